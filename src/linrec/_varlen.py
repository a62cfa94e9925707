"""Where parts of sequences lie, and how to read and write them in place."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Windows(NamedTuple):
    """Parts of the sequence axis, in order of time. Part `c` is the tokens `low[c] <= t < high[c]`.

    It is read through the window of `size` tokens that begins at `start[c]`. The window may reach
    over its part at either end, never over the sequence axis.
    """

    start: Int[Array, " parts"]
    low: Int[Array, " parts"]
    high: Int[Array, " parts"]
    size: int
    whole: bool
    """No window reaches over its part: nothing to mask."""

    def __len__(self) -> int:
        return self.start.shape[0]

    def load(self, array: Array, c: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, self.start[c], self.size, axis=1)

    def store(self, array: Array, new: Array, c: Int[Array, ""]) -> Array:
        new = new.astype(array.dtype)
        if not self.whole:
            new = jnp.where(self.valid(c, new.ndim), new, self.load(array, c))
        return jax.lax.dynamic_update_slice_in_dim(array, new, self.start[c], axis=1)

    def valid(self, c: Int[Array, ""], ndim: int) -> Bool[Array, "..."]:
        """Which tokens of the window are of the part."""
        t = self.start[c] + jnp.arange(self.size, dtype=jnp.int32)
        valid = (self.low[c] <= t) & (t < self.high[c])
        return valid.reshape(1, -1, *(1,) * (ndim - 2))


class Parts(NamedTuple):
    """Part `c` is of sequence `sequence[c]`. Those from `used` on are empty."""

    windows: Windows
    sequence: Int[Array, " parts"]
    used: Int[Array, ""]


def boundaries(cu_seqlens: Int[Array, " boundaries"] | None, T: int) -> Int[Array, " boundaries"]:
    """Those of one sequence of `T` tokens, if none are given."""
    return T * jnp.arange(2, dtype=jnp.int32) if cu_seqlens is None else cu_seqlens


def plan_parts(
    cu_seqlens: Int[Array, " boundaries"] | None, T: int, size: int, reverse: bool
) -> Parts:
    """Gives every sequence parts of its own, of `size` tokens but for the last.

    The number of parts depends on shapes only, so that one compilation serves every packing: `N`
    sequences need at most `T // size + N`.
    """
    dense = cu_seqlens is None
    cu_seqlens = boundaries(cu_seqlens, T)
    number = -(-T // size) if dense else T // size + cu_seqlens.shape[0] - 1
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    # One past the last part of each sequence.
    last = jnp.cumsum(-(-(end - begin) // size), dtype=jnp.int32)
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
    start = jnp.where(spare, 0, start)
    return Parts(Windows(start, low, high, size, dense and T % size == 0), sequence, last[-1])


def plan_pieces(T: int, size: int, reverse: bool) -> Windows:
    """Cuts the whole axis, whatever sequences lie on it.

    If one piece is short, it is the first in memory: what its window reaches over comes after it,
    where padding is.
    """
    end = jnp.arange(T, 0, -size, dtype=jnp.int32)
    end = end if reverse else end[::-1]
    begin = jnp.maximum(end - size, 0)
    return Windows(begin, begin, end, size, T % size == 0)


def is_token(cu_seqlens: Int[Array, " boundaries"], T: int) -> Bool[Array, " seq"]:
    """Which places of the axis are tokens of sequences: the others are padding."""
    return jnp.arange(T, dtype=jnp.int32) < cu_seqlens[-1]


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
    size: int | Int[Array, ""]
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
        """Which sequences end in this one of so many pieces. Every one does so in one of them."""
        last = self.bounds[:-1] if self.reverse else self.bounds[1:] - 1
        return jnp.clip(last // self.size, 0, pieces - 1) == self.begin // self.size
