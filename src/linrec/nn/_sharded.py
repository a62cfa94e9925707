"""Layers whose sequence axis is sharded.

The whole layer runs inside `jax.shard_map`, on every device with the tokens of its shard and with
all states. No part of it but the timeline has to know.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from .._method.sequence_parallel import Cut, OneShard, SequenceParallel
from .._varlen import Piece
from ._state import repeat_state
from ._timeline import AbstractTimeline, Packed, sequence_timeline


def run_sharded(
    layer: Any,
    x: Shaped[Array, " seq *dim"],
    state: PyTree,
    cu_seqlens: Array | None,
    parallel: SequenceParallel,
) -> tuple[Array, PyTree]:
    """`layer.run(x, state, time)` on all devices."""
    cut = Cut.of(parallel, x.shape[0], cu_seqlens)
    # One sequence that does not fill its shards is like one of several that are packed.
    one = cut.ragged and cu_seqlens is None
    state = repeat_state(state, 1) if one else state
    arrays, static = eqx.partition(layer, eqx.is_array)
    whole, of_tokens = PartitionSpec(), PartitionSpec(parallel.axis)

    @parallel.shard_map(in_specs=(whole, of_tokens, whole, whole), out_specs=(of_tokens, whole))
    def run(arrays, x, state, bounds):
        piece = cut.piece(bounds, reverse=False)
        cu_seqlens = piece.cu_seqlens if cut.ragged else None
        local = sequence_timeline(cut.size, cu_seqlens, OneShard(parallel, piece))
        return eqx.combine(arrays, static).run(x, state, Shard(local, piece, parallel))

    y, state = run(arrays, cut.pad(x, 0), state, cut.bounds)
    state = jax.tree.map(lambda x: x[0], state) if one else state
    return y[: x.shape[0]], state


class Shard(AbstractTimeline):
    """The part of time that a device has. Inside of it, time is `local`.

    The history of the sequence that comes in from the shard before is what it has been there.
    """

    recurrent: Callable
    local: AbstractTimeline
    piece: Piece
    parallel: SequenceParallel

    def __init__(self, local: AbstractTimeline, piece: Piece, parallel: SequenceParallel):
        self.recurrent = local.recurrent
        self.local = local
        self.piece = piece
        self.parallel = parallel

    def _of_sequences(self, rows: Array) -> Array:
        """Drops the axis of sequences where states have none."""
        return rows if isinstance(self.local, Packed) else rows[0]

    def positions(self, start):
        lengths = jnp.diff(self.piece.bounds)
        earlier = jnp.clip(self.piece.begin - self.piece.bounds[:-1], 0, lengths)
        return self.local.positions(start + self._of_sequences(earlier))

    def end(self, start):
        return start + self._of_sequences(jnp.diff(self.piece.bounds))

    def extend(self, history, x):
        rows = history if isinstance(self.local, Packed) else history[None]
        M = rows.shape[1]
        if M == 0:
            return self.local.extend(history, x)
        comes_in = self.piece.comes_in()
        n = jnp.argmax(comes_in)
        # Where in its sequence the row lies. Before its first token is the history that was given.
        place = self.piece.begin - self.piece.bounds[n] + jnp.arange(-M, 0, dtype=jnp.int32)
        given = rows[n][jnp.clip(place + M, 0, M - 1)]
        came = jnp.where(_over(place >= 0, given), self._tokens_before(x, M), given)
        rows = jnp.where(_over(comes_in, rows), came[None], rows)
        return self.local.extend(self._of_sequences(rows), x)

    def _tokens_before(self, x: Array, number: int) -> Array:
        """So many tokens before the shard, from as many other shards as it takes."""
        size, ring = self.piece.size, self.parallel.ring(reverse=False)
        pieces = []
        for distance in range(1, -(-number // size) + 1):
            tail = x[-min(size, number - (distance - 1) * size) :]
            pieces.insert(0, ring.shift(tail, distance))
        return jnp.concatenate(pieces)

    def at_tokens(self, y, history):
        return self.local.at_tokens(y, history)

    def last(self, extended, history):
        rows = self.local.last(extended, history)
        ends = _over(self._of_sequences(self.piece.ends(self.parallel.shards)), rows)
        return jax.lax.psum(jnp.where(ends, rows, jnp.zeros_like(rows)), self.parallel.axis)

    def layers_first(self, state):
        return self.local.layers_first(state)


def _over(mask: Array, x: Array) -> Array:
    """`mask` with the axes that it lacks to be one over `x`."""
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
