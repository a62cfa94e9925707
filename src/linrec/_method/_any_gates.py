"""What happens inside chunks whose gates per channel are too strong to be factorised."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._chunk import Chunks, column, Decay, Read, Write
from ._gates import balanced, FORGET
from ._products import sum_rows


def effect_of_any_gates(chunks: Chunks) -> tuple[Read, Write]:
    """Exact at any strength: keys decay up to a boundary, queries from there on, (8).

    For each power of two, blocks of so many tokens form pairs, of which the second reads the first.
    """
    q, k, v = map(chunks.heads_first, (chunks.q, chunks.k, chunks.v))
    gates = _Gates.of(chunks)
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (chunks.size,) * 2, axis) for axis in (0, 1))

    @jax.checkpoint
    def of_pairs(level: Int[Array, ""]) -> Array:
        """The scores, or with gates per value channel, which differ by level, what is read."""
        reads = (i[:, :1] >> level) % 2 == 1
        same_block, neighbours = (i ^ j) >> level == 0, (i ^ j) >> level == 1
        decays = gates.decays(same_block & jnp.where(reads, j <= i, j > i))
        factors = decays.of_keys(jnp.where(reads, q, k))  # a token either reads or is read
        scores = chunks.product("ik,jk->ij", factors, factors)
        scores = jnp.where(neighbours & (j < i), scores, 0)
        if chunks.gv is None:
            return scores
        return decays.of_values(chunks.product("ij,jv->iv", scores, decays.of_values(v)))

    own = sum_rows(q * k)
    total, _ = jax.lax.scan(
        lambda total, level: (total + of_pairs(level), None),
        jnp.where(i == j, own, 0) if chunks.gv is None else own * v,
        jnp.arange(chunks.size.bit_length() - 1, dtype=jnp.int32),
    )
    inside = chunks.product("ij,jv->iv", total, v) if chunks.gv is None else total
    from_start, to_end = gates.decays(j <= i), gates.decays(j > i)
    read = Read(inside, from_start.of_keys(q), from_start.value, chunks.product)
    written = chunks.product("jk,jv->kv", to_end.of_keys(k), to_end.of_values(v))
    key, value = (None if x is None else x[..., -1:, :] for x in from_start)
    decay = Decay(None if key is None else column(key, k.shape[-1]), value)
    return read, Write(decay, written, Decay())


class _Gates(NamedTuple):
    """Log-decays of tokens, of key and of value channels, where there are any."""

    key: Float[Array, "*chunks heads chunk key_or_1"] | None
    value: Float[Array, "*chunks heads chunk value"] | None

    @staticmethod
    def of(chunks: Chunks) -> "_Gates":
        def together(*gates: Array | None) -> Array | None:
            given = [chunks.heads_first(g) for g in gates if g is not None]
            return jnp.maximum(sum(given[1:], start=given[0]), FORGET) if given else None

        # Balanced: what cancels here has no digits to lose in sums.
        return _Gates(*balanced(together(chunks.g, chunks.gk), together(chunks.gv)))

    def decays(self, which: Bool[Array, "chunk chunk"]) -> "_Decays":
        """For each token, by the gates of which tokens. Nothing is ever subtracted."""

        def add_up(g: Array) -> Array:
            ones = which.astype(g.dtype)
            return jnp.einsum("it,...tx->...ix", ones, g, precision=jax.lax.Precision.HIGHEST)

        return _Decays(*jax.tree.map(jnp.exp, balanced(*jax.tree.map(add_up, tuple(self)))))


class _Decays(NamedTuple):
    key: Float[Array, "*chunks heads chunk key_or_1"] | None
    value: Float[Array, "*chunks heads chunk value_or_1"] | None

    def of_keys(self, x: Float[Array, "*chunks heads chunk key"]) -> Array:
        return x if self.key is None else x * self.key

    def of_values(self, x: Float[Array, "*chunks heads chunk value"]) -> Array:
        return x if self.value is None else x * self.value
