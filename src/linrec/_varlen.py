"""Where the chunks of packed sequences lie."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Chunks(NamedTuple):
    """Chunk `c` holds the tokens `low[c] <= t < high[c]` of sequence `sequence[c]`.

    It is read through the window of `size` tokens that begins at `start[c]`. The window may reach
    over its chunk at either end, never over the sequence axis. Chunks are in order of time; those
    from `used` on are empty.
    """

    sequence: Int[Array, " chunks"]
    start: Int[Array, " chunks"]
    low: Int[Array, " chunks"]
    high: Int[Array, " chunks"]
    used: Int[Array, ""]

    def __len__(self) -> int:
        return self.sequence.shape[0]


def plan_chunks(
    cu_seqlens: Int[Array, " boundaries"] | None, T: int, size: int, reverse: bool
) -> Chunks:
    """Gives every sequence whole chunks of its own.

    The number of chunks depends on shapes only, so that one compilation serves every packing: `N`
    sequences need at most `T // size + N`.
    """
    if cu_seqlens is None:
        number = -(-T // size)
        cu_seqlens = T * jnp.arange(2, dtype=jnp.int32)
    else:
        number = T // size + cu_seqlens.shape[0] - 1
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    last = jnp.cumsum(
        -(-(end - begin) // size), dtype=jnp.int32
    )  # one past the last chunk of each sequence
    index = jnp.arange(number, dtype=jnp.int32)
    sequence = jnp.searchsorted(last, index, side="right").astype(jnp.int32)
    spare = sequence == begin.shape[0]
    sequence = jnp.minimum(sequence, begin.shape[0] - 1)
    first = jnp.concatenate([jnp.zeros((1,), last.dtype), last[:-1]])
    offset = (index - first[sequence]) * size
    if reverse:
        high = end[sequence] - offset
        low = jnp.maximum(high - size, begin[sequence])
        start = jnp.maximum(high - size, 0)
    else:
        low = begin[sequence] + offset
        high = jnp.minimum(low + size, end[sequence])
        start = jnp.minimum(low, T - size)
    high = jnp.where(spare, low, high)
    return Chunks(sequence, jnp.where(spare, 0, start), low, high, last[-1])


def sequence_of_token(cu_seqlens: Int[Array, " boundaries"] | None, T: int) -> Int[Array, " seq"]:
    """Which sequence each token belongs to; `N` for the padding after the last."""
    if cu_seqlens is None:
        return jnp.zeros((T,), jnp.int32)
    return jnp.searchsorted(cu_seqlens[1:], jnp.arange(T, dtype=jnp.int32), side="right").astype(
        jnp.int32
    )


class Piece(NamedTuple):
    """The tokens `begin <= t < begin + size` of an axis on which sequences are packed.

    One sequence at most comes in over the boundary where the piece is entered, and one at most goes
    out over the other. Which is which depends on the direction of time.
    """

    bounds: Int[Array, " boundaries"]
    """Of the sequences on the whole axis."""
    begin: Int[Array, ""]
    size: int
    reverse: bool

    @property
    def cu_seqlens(self) -> Int[Array, " boundaries"]:
        """Of the sequences inside the piece: those that have no token in it are empty."""
        return jnp.clip(self.bounds - self.begin, 0, self.size)

    def comes_in(self) -> Bool[Array, " num_seqs"]:
        return self._crosses(self.begin + self.size if self.reverse else self.begin)

    def goes_out(self) -> Bool[Array, " num_seqs"]:
        return self._crosses(self.begin if self.reverse else self.begin + self.size)

    def _crosses(self, boundary: Int[Array, ""]) -> Bool[Array, " num_seqs"]:
        return (self.bounds[:-1] < boundary) & (boundary < self.bounds[1:])

    def ends(self, pieces: int) -> Bool[Array, " num_seqs"]:
        """Which sequences end in this one of so many pieces. Empty ones do so in one of them too."""
        last = self.bounds[:-1] if self.reverse else self.bounds[1:] - 1
        return jnp.clip(last // self.size, 0, pieces - 1) == self.begin // self.size
