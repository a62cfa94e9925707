"""The only place that knows jax_triton."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jaxtyping import Array


class Call(NamedTuple):
    """A launch as it was traced."""

    name: str
    kernel: Any
    arguments: list[Any]
    """Arrays, or their shapes, and integers, in the order of the kernel's parameters."""
    grid: tuple[int, ...]
    warps: int
    stages: int
    constants: dict[str, Any]


_records: list[list[Call]] = []


@contextlib.contextmanager
def record_calls() -> Iterator[list[Call]]:
    """Gathers the launches of what is traced meanwhile."""
    record = []
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def call(
    name: str,
    kernel: Any,
    inputs: Sequence[Array | None],
    sizes: Sequence[int],
    outputs: Sequence[jax.ShapeDtypeStruct | None],
    *,
    grid: tuple[int, ...],
    warps: int,
    stages: int,
    compute_capability: int,
    interpret: bool,
    aliases: dict[int, int] | None = None,
    **constants: Any,
) -> list[Any]:
    """Launches a kernel whose parameters are `inputs`, `sizes`, `outputs`, then the constants.

    `None` stands for what the kernel does not touch with these constants, in the results too.
    `aliases` maps inputs to the outputs that take over their memory.
    """
    # Something has to be passed: for an input one that is there, for an output one element.
    present = next(x for x in inputs if x is not None)
    placeholder = jax.ShapeDtypeStruct((1,), jnp.float32)
    arguments = [present if x is None else x for x in inputs]
    out_shape = [placeholder if x is None else x for x in outputs]
    for record in _records:
        everything = [*arguments, *sizes, *out_shape]
        record.append(Call(name, kernel, everything, grid, warps, stages, constants))
    if interpret:
        from .interpret import call_interpreter

        results = call_interpreter(
            name, kernel, arguments, sizes, out_shape, grid, aliases, constants
        )
    else:
        results = jax_triton().triton_call(
            *arguments,
            *sizes,
            kernel=kernel,
            out_shape=out_shape,
            grid=grid,
            name=f"linrec_{name}",
            num_warps=warps,
            num_stages=stages,
            compute_capability=compute_capability,
            input_output_aliases=aliases or {},
            **constants,
        )
    return [None if x is None else result for x, result in zip(outputs, results, strict=True)]


@functools.cache
def jax_triton() -> Any:
    """The module, ready for use."""
    try:
        import jax_triton
        from jax_triton import triton_lib
    except ImportError as error:
        raise ImportError(
            "`linrec.Triton` calls its kernels through jax-triton, which cannot be imported here "
            f"({error}). Install `linrec[cuda12]` or `linrec[cuda13]`, whichever CUDA the machine "
            "has, or use `linrec.Chunked()`, which runs everywhere."
        ) from error

    def refuse(ctx: Any, *args: Any, **kwargs: Any):
        del args, kwargs
        platforms = ctx.module_context.platforms
        lowered = (
            f"`linrec.Triton` runs on CUDA and ROCm GPUs, but this program is lowered for "
            f"{' and '.join(platforms)}. "
        )
        if len(platforms) > 1:
            raise NotImplementedError(
                f"{lowered}Lower for one platform at a time, or use `linrec.Chunked()` on all."
            )
        raise NotImplementedError(
            f"{lowered}Use `linrec.Auto()`, the default, which takes `linrec.Chunked()` there; "
            "or lower for a GPU: "
            "`jax.jit(f).trace(*args).lower(lowering_platforms=('cuda',))`."
        )

    # For all platforms that have no rule of their own.
    mlir.register_lowering(triton_lib.triton_kernel_call_p, refuse)
    return jax_triton


@functools.cache
def is_available() -> bool:
    """Whether kernels can be called, on a GPU or for one."""
    try:
        jax_triton()
    except ImportError:
        return False
    return True
