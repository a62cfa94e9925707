"""What a user would take instead of linrec. Each is imported when it is asked to run."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._cases import Case
from ._contestants import Contestant
from ._programs import Inputs, run_eagerly
from ._torch import run_torch


def _only(*gates: str):
    return lambda case: None if case.gate in gates else "has no such gate"


def _scalar_gate(inputs: Inputs) -> Array:
    """One gate per token and head, for those who have no fixed decay, or cannot do without."""
    B, T, H, _ = inputs["query"].shape
    g = inputs.get("g", jnp.zeros((B, T, H), jnp.float32))
    return g + inputs["g_gamma"][None, None] if "g_gamma" in inputs else g


def _jla(inputs: Inputs) -> Array:
    from jla.ops import linear_attention  # pyright: ignore[reportMissingImports]

    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    if "gk" in inputs:
        return linear_attention("gla", q, k, v, g=inputs["gk"])[0]
    return linear_attention("simple_gla", q, k, v, g=_scalar_gate(inputs))[0]


def _ejkernel(inputs: Inputs) -> Array:
    from ejkernel.kernels._xla.recurrent import (  # pyright: ignore[reportMissingImports]
        recurrent,
    )

    if "g" in inputs:  # per key channel here
        inputs = inputs | {"g": jnp.broadcast_to(inputs["g"][..., None], inputs["query"].shape)}
    # Without a state it makes one of the wrong shape where keys and values differ in size.
    (B, _, H, K), V = inputs["query"].shape, inputs["value"].shape[-1]
    return recurrent(**inputs, initial_state=jnp.zeros((B, H, K, V), jnp.float32))[0]


def _associative_scan(inputs: Inputs) -> Array:
    """All states at once, by a tree over the tokens."""
    q, k, v = (inputs[name].astype(jnp.float32) for name in ("query", "key", "value"))
    writes = k[..., None] * v[..., None, :]
    if inputs.keys() == {"query", "key", "value"}:
        states = jax.lax.associative_scan(jnp.add, writes, axis=1)
    else:
        decay = jnp.exp(_scalar_gate(inputs))[..., None, None]
        if "gk" in inputs:
            decay = decay * jnp.exp(inputs["gk"])[..., None]
        if "gv" in inputs:
            decay = decay * jnp.exp(inputs["gv"])[..., None, :]

        def combine(before, after):
            return before[0] * after[0], before[1] * after[0] + after[1]

        states = jax.lax.associative_scan(combine, (decay, writes), axis=1)[1]
    q = q * q.shape[-1] ** -0.5
    o = jnp.einsum("bthk,bthkv->bthv", q, states, precision=jax.lax.Precision.HIGHEST)
    return o.astype(inputs["value"].dtype)


def _softmax_attention(inputs: Inputs) -> Array:
    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _no_softmax(case: Case) -> str | None:
    *_, K, V = case.shape
    return "has no gates" if case.gates else "wants keys as wide as values" if K != V else None


def _fla(inputs):
    """The reference code of flash-linear-attention, on torch tensors."""
    from fla.ops.gla.naive import (  # pyright: ignore[reportMissingImports]
        naive_recurrent_gla,
    )
    from fla.ops.linear_attn.naive import (  # pyright: ignore[reportMissingImports]
        naive_chunk_linear_attn,
    )
    from fla.ops.simple_gla.naive import (  # pyright: ignore[reportMissingImports]
        naive_chunk_simple_gla,
    )

    q, k, v = (inputs[name] for name in ("query", "key", "value"))
    if "gk" in inputs:
        return naive_recurrent_gla(q, k, v, inputs["gk"])[0]
    if "g" in inputs:
        return naive_chunk_simple_gla(q, k, v, inputs["g"])[0]
    if "g_gamma" in inputs:
        return naive_chunk_simple_gla(q, k, v, inputs["g_gamma"].expand(q.shape[:-1]))[0]
    return naive_chunk_linear_attn(q, k, v)


PEERS = (
    Contestant("jla", _jla, _only("none", "g", "g_gamma", "gk"), module="jla"),
    Contestant("ejkernel", _ejkernel, module="ejkernel"),
    # Its gradients, and its fixed decay, cannot be traced.
    Contestant("ejkernel-no-jit", _ejkernel, build=run_eagerly, module="ejkernel"),
    Contestant("associative_scan", _associative_scan),
    Contestant("softmax", _softmax_attention, _no_softmax, same_maths=False),
    Contestant("fla-torch", _fla, _only("none", "g", "g_gamma", "gk"), run_torch, module="fla"),
)
