"""Sequences that cross the boundaries of a shard: what goes out, and what is read of what came in.

Both are one product over all tokens at once, each with its decay up to the boundary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._inputs import Inputs
from .._varlen import Piece
from ._exchange import decay, exp, Map
from ._gates import balanced, FORGET


def as_map(inputs: Inputs, piece: Piece) -> Map:
    """What the shard does to the state of the sequence that goes out of it.

    If it starts in the shard, or if there is none, nothing is left of what comes in.
    """
    sequence = _Sequence.which(piece, piece.goes_out())
    gates = sequence.gates(inputs, after=True)
    k_factor, v_factor = gates.factors()
    k = sequence.tokens(inputs, inputs.k) * k_factor
    v = sequence.tokens(inputs, inputs.v) * v_factor
    written = jnp.einsum("bthk,bthv->bhkv", k, v, precision=inputs.precision)
    goes_through = sequence.crosses & piece.comes_in()[sequence.n]
    starts_here = sequence.crosses & ~goes_through
    start = jnp.where(starts_here, inputs.initial_state[:, sequence.n], 0)
    return Map(
        jnp.where(goes_through, gates.all_key, FORGET),
        gates.all_value,
        decay(start, gates.all_key, gates.all_value) + written,
    )


def add_incoming(
    inputs: Inputs, piece: Piece, h: Array, output: Array, final_state: Array
) -> tuple[Array, Array]:
    """The results that a shard has from nothing, plus what it has from the state that comes in."""
    sequence = _Sequence.which(piece, piece.comes_in())
    gates = sequence.gates(inputs, after=False)
    q_factor, o_factor = gates.factors()
    q = sequence.tokens(inputs, inputs.q) * q_factor
    read = jnp.einsum("bthk,bhkv->bthv", q, h, precision=inputs.precision) * o_factor
    read = read * inputs.scale[:, None, None, None]
    left = decay(h, gates.all_key, gates.all_value)[:, None]
    left = jnp.where(piece.comes_in()[None, :, None, None, None], left, 0)
    return (output.astype(read.dtype) + read).astype(output.dtype), final_state + left


class _Sequence(NamedTuple):
    """The one that crosses a boundary of a shard, if there is one."""

    n: Int[Array, ""]
    crosses: Bool[Array, ""]
    counts: Bool[Array, "1 seq 1 1"]
    """Which tokens are of it."""

    @staticmethod
    def which(piece: Piece, crosses: Bool[Array, " num_seqs"]) -> "_Sequence":
        n = jnp.argmax(crosses)
        t = jnp.arange(piece.size, dtype=jnp.int32)
        counts = (piece.cu_seqlens[n] <= t) & (t < piece.cu_seqlens[n + 1]) & crosses[n]
        return _Sequence(n, crosses[n], counts[None, :, None, None])

    def tokens(self, inputs: Inputs, x: Array) -> Float[Array, "batch seq heads channels"]:
        # First of all without what is padding: it may hold anything.
        x = jnp.where(self.counts, x.astype(inputs.state_dtype), 0)
        return jnp.repeat(x, inputs.q.shape[2] // x.shape[2], axis=2)

    def gates(self, inputs: Inputs, after: bool) -> "_Gates":
        """Those after each token, or else up to each token and its own."""
        g = None if inputs.g is None else inputs.g[..., None]
        g_gamma = None if inputs.g_gamma is None else inputs.g_gamma[:, self.n][:, None, :, None]
        key, all_key = self._sums(inputs, after, g, g_gamma, inputs.gk)
        value, all_value = self._sums(inputs, after, inputs.gv)
        return _Gates(key, all_key[..., None], value, all_value[..., None, :])

    def _sums(self, inputs: Inputs, after: bool, *gates: Array | None) -> tuple[Array, Array]:
        zeros = inputs.zeros((*inputs.q.shape[:3], 1), inputs.state_dtype)
        given = [x.astype(zeros.dtype) for x in gates if x is not None]
        if not given:
            return zeros, zeros[:, 0]
        g = sum(given, start=zeros)
        g = jnp.where(self.counts, jnp.maximum(g, FORGET), 0)
        backwards = after != inputs.reverse
        sums = jax.lax.cumsum(g, axis=1, reverse=backwards)
        total = sums[:, 0] if backwards else sums[:, -1]
        if after:
            # Shifted: a difference would lose digits after a strong gate.
            nothing = jnp.zeros_like(g[:, :1])
            parts = [sums[:, 1:], nothing] if backwards else [nothing, sums[:, :-1]]
            sums = jnp.concatenate(parts, 1)
        return sums, total


class _Gates(NamedTuple):
    """Added up over tokens."""

    key: Float[Array, "batch seq heads key_or_1"]
    all_key: Float[Array, "batch heads key_or_1 1"]
    value: Float[Array, "batch seq heads value_or_1"]
    all_value: Float[Array, "batch heads 1 value_or_1"]

    def factors(self) -> tuple[Array, Array]:
        """Of key channels and of value channels."""
        return jax.tree.map(exp, balanced(self.key, self.value))
