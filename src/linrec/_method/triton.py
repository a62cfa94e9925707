"""The Triton kernels as a method: derivatives, `vmap`, `shard_map`."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._inputs import Inputs, vary_alike
from .._transform import fold_vmap
from .._triton.call import jax_triton
from .._triton.config import KernelConfig, Launch, MAX_DECODE_KEY
from .base import AbstractMethod
from .chunked import Chunked


# Up to this many tokens are decoded: one launch instead of two, no states of chunks.
_FEW_TOKENS = 8
# Where there is no GPU that could be asked.
_COMPUTE_CAPABILITY = 90


class Triton(AbstractMethod):
    """Triton kernels, for NVIDIA and AMD GPUs.

    Two launches forward, three backward, one for up to 8 tokens without a gradient. The states
    between chunks are the only ones that are kept. Gates of any size are exact: chunks whose
    per-channel gates are too strong for tensor cores take a slower form, which is decided inside
    the kernels.

    Needs `linrec[cuda12]` or `linrec[cuda13]`. Runs on a GPU only; the kernels can be compiled for
    one anywhere. Has reverse-mode derivatives of every order, from the second on in XLA.

    **Arguments:**

    - `config`: a [`linrec.KernelConfig`][]. Defaults to one that suits the gates and dtypes.
    - `input_precision`: of products of float32 inputs: `"ieee"` is exact, `"tf32"` faster,
        `"tf32x3"` in between.
    - `compute_capability`: of the GPU to compile for, for example 80 or 90. Defaults to that of the
        machine's first GPU, or to 90 where there is none.
    - `interpret`: run the kernels in Triton's interpreter, on a CPU, very slowly. For tests.
    """

    config: KernelConfig | None = eqx.field(static=True, default=None)
    input_precision: Literal["ieee", "tf32", "tf32x3"] = eqx.field(static=True, default="ieee")
    compute_capability: int | None = eqx.field(static=True, default=None)
    interpret: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if self.input_precision not in ("ieee", "tf32", "tf32x3"):
            raise ValueError(
                "`linrec.Triton(input_precision=...)` expects 'ieee', 'tf32' or 'tf32x3', but got "
                f"{self.input_precision!r}."
            )

    def unsupported(self, inputs: Inputs) -> str | None:
        allowed = (jnp.float32, jnp.bfloat16, jnp.float16)
        for x in jax.tree.leaves(inputs.rows):
            if x.dtype not in allowed:
                return (
                    f"the kernels compute in float32, and an input is {x.dtype}. Cast the inputs "
                    "to float32, bfloat16 or float16, or use `linrec.Chunked()`."
                )
        return None

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        rows, cu_seqlens = inputs.rows, inputs.cu_seqlens
        if cu_seqlens is not None:  # one of each row's own, so that it can be mapped over
            shape = (inputs.q.shape[0], *cu_seqlens.shape)
            cu_seqlens = jnp.broadcast_to(cu_seqlens, shape)
        return _run(self._launch(), (rows, cu_seqlens))

    def decode(self, inputs: Inputs, in_xla: Callable[[Inputs], Any]) -> tuple[Array, Array]:
        """What `in_xla(inputs)` computes, in one launch. Derivatives are those of `in_xla`."""
        if inputs.q.shape[-1] > MAX_DECODE_KEY or 0 in inputs.initial_state.shape:
            return in_xla(inputs)
        return _decode_as(self._launch(), in_xla, inputs)

    def _launch(self) -> Launch:
        jax_triton()
        capability = self.compute_capability or _compute_capability()
        return Launch(self.config, self.input_precision, capability, self.interpret)


def _compute_capability() -> int:
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return _COMPUTE_CAPABILITY
    # Of an AMD GPU this is a name; its kernels are compiled for the device that there is.
    capability = str(device.compute_capability).replace(".", "")
    return int(capability) if capability.isdigit() else _COMPUTE_CAPABILITY


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(launch, problem):
    rows, cu_seqlens = problem
    _, T, _, K = rows.q.shape
    if T <= _FEW_TOKENS and K <= MAX_DECODE_KEY and cu_seqlens is None:
        return fold_vmap(partial(_decode, launch), _in_xla)(problem, None)
    output, final_state, _ = _forward_call(launch)(problem, None)
    return output, final_state


def _run_forward(launch, problem):
    output, final_state, states = _forward_call(launch)(problem, None)
    return (output, final_state), (problem, states)


def _run_backward(launch, residuals, cotangents):
    call = fold_vmap(partial(_backward, launch), _backward_in_xla)
    return ((call((*residuals, cotangents), None), None),)


_run.defvjp(_run_forward, _run_backward)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _decode_as(launch, in_xla, inputs):
    return fold_vmap(partial(_decode, launch))((inputs, None), None)


@_decode_as.defjvp
def _decode_as_jvp(launch, in_xla, primals, tangents):
    _, tangents_out = jax.jvp(in_xla, primals, tangents)
    return _decode_as(launch, in_xla, *primals), tangents_out


def _forward_call(launch):
    return fold_vmap(partial(_forward, launch), partial(_forward_in_xla, launch))


def _forward(launch, problem, _):
    from .._triton.forward import forward

    rows, _ = problem
    return _vary_as(rows, forward(launch, *problem))


def _backward(launch, problem, _):
    from .._triton.backward import backward

    (rows, cu_seqlens), states, (d_output, d_final) = problem
    return _vary_as(rows, backward(launch, rows, cu_seqlens, states, d_output, d_final))


def _decode(launch, problem, _):
    from .._triton.decode import decode

    rows, _ = problem
    return _vary_as(rows, decode(launch, rows))


def _vary_as(rows: Inputs, results):
    """What kernels return has lost its varying type, without which gradients go wrong."""
    return vary_alike((rows, results))[1]


# The same in XLA, to be differentiated: kernels cannot be.


def _in_xla(problem, _):
    rows, cu_seqlens = problem

    def of_row(row, cu_seqlens):
        row = jax.tree.map(lambda x: x[None], row)
        row = dataclasses.replace(row, cu_seqlens=cu_seqlens)
        return jax.tree.map(lambda x: x[0], Chunked()(row))

    return jax.vmap(of_row)(rows, cu_seqlens)


def _forward_in_xla(launch, problem, _):
    # The states are a means: `_backward_in_xla` does without, so that they have no gradient.
    states = jax.eval_shape(partial(_forward, launch), problem, None)[2]
    rows, _ = problem
    return *_in_xla(problem, None), rows.zeros(states.shape, states.dtype)


def _backward_in_xla(problem, _):
    (rows, cu_seqlens), _, cotangents = problem
    return jax.vjp(lambda rows: _in_xla((rows, cu_seqlens), None), rows)[1](cotangents)[0]
