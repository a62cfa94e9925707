"""The launches of the backward pass."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._inputs import Inputs
from .config import fit, Launch
from .forward import Problem


def backward(
    launch: Launch,
    rows: Inputs,
    cu_seqlens: Int[Array, "batch boundaries"] | None,
    states: Float[Array, "batch slots heads key value"],
    d_output: Array,
    d_final: Array,
) -> Inputs:
    """The gradient of every input, as `Inputs`."""
    problem = Problem.of(launch, rows, cu_seqlens)
    config, struct = problem.config, jax.ShapeDtypeStruct
    d_states, d_initial = problem.walk(rows.q, d_output, rows, cu_seqlens, d_final, backward=True)

    def like(x: Array | None) -> jax.ShapeDtypeStruct | None:
        return None if x is None else struct(x.shape, x.dtype)

    B, T, H = rows.q.shape[:3]
    blocks = -(-problem.K // fit(config.d_key.outer, problem.K))
    per_chunk = struct((blocks, B, problem.slots, H), jnp.float32)
    per_token = struct((blocks, B, T, H), jnp.float32)
    d_q, d_k, d_gk, d_g, d_gamma, d_scale = problem.pairs(
        "d_key", config.d_key, rows, cu_seqlens,
        d_output, rows.v, rows.q, rows.k, states, d_states,
        (
            like(rows.q),
            like(rows.k),
            like(rows.gk),
            None if rows.g is None else per_token,
            None if rows.g_gamma is None else per_chunk,
            per_chunk,
        ),
        out_is_key=True,
    )  # fmt: skip
    _, d_v, d_gv, *_ = problem.pairs(
        "d_value", config.d_value, rows, cu_seqlens,
        rows.q, rows.k, d_output, rows.v, states, d_states,
        (None, like(rows.v), like(rows.gv), None, None, None), out_is_key=False,
    )  # fmt: skip

    # What is left is small: nothing here has channels.
    if rows.g is not None:
        d_g = jnp.sum(d_g, 0).astype(rows.g.dtype)
    if d_gamma is not None:
        d_gamma = jnp.sum(d_gamma, 0)
        if cu_seqlens is None:
            d_gamma = jnp.sum(d_gamma, 1, keepdims=True)
        else:
            d_gamma = _sum_by_sequence(d_gamma, cu_seqlens, config.chunk)
    d_scale = jnp.sum(d_scale, (0, 2, 3))
    return rows.gradient((d_q, d_k, d_v, d_g, d_gk, d_gv), d_gamma, d_scale, d_initial)


def _sum_by_sequence(
    per_slot: Float[Array, "batch slots heads"], cu_seqlens: Int[Array, "batch boundaries"], BT: int
) -> Float[Array, "batch num_seqs heads"]:
    N = cu_seqlens.shape[1] - 1
    slots = jnp.arange(per_slot.shape[1], dtype=jnp.int32)

    def of_row(per_slot, cu_seqlens):
        first = cu_seqlens // BT + jnp.arange(N + 1, dtype=jnp.int32)  # see `find_sequence`
        sequence = jnp.searchsorted(first, slots, side="right") - 1
        return jax.ops.segment_sum(per_slot, sequence, N + 1)[:N]

    return jax.vmap(of_row)(per_slot, cu_seqlens)
