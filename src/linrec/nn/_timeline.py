"""The time axis. Layers are written once, for arrays of shape `(T, ...)`; what time means, one
sequence, several packed ones, or a single token, is the timeline's affair.

Convolutions and windowed attention look back over a *history*: the last `M` rows before the first
token, kept in the state. `extend` puts every sequence's history in front of it. An operation that
makes one row out of every `M + 1` successive rows of the result can then ignore where sequences
begin; `at_tokens` takes its rows at the tokens, and `last` the history for the tokens to come.
"""

import abc
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree, Shaped

from .._method.base import AbstractMethod
from .._method.scan import step
from .._recurrent import run_recurrence
from .._varlen import sequence_of_token


class AbstractTimeline(eqx.Module):
    recurrent: eqx.AbstractVar[Callable]
    """`recurrent(q, k, v, h, **gates) -> (o, h)`."""

    @abc.abstractmethod
    def positions(self, start: Int[Array, "*rows"]) -> Int[Array, " seq"]:
        """Where each token stands in its sequence, of which `start` tokens came before."""

    @abc.abstractmethod
    def end(self, start: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """How many tokens there are at the end, of which `start` came before."""

    @abc.abstractmethod
    def extend(
        self, history: Shaped[Array, "..."], x: Shaped[Array, " seq *channels"]
    ) -> Shaped[Array, " extended *channels"]:
        """Puts every sequence's history, `(*rows, history, *channels)`, in front of its tokens."""

    @abc.abstractmethod
    def at_tokens(
        self, y: Shaped[Array, " extended_less_history *channels"], history: int
    ) -> Shaped[Array, " seq *channels"]:
        """The rows at the tokens, where row `i` of `y` was made of rows `i` to `i + history`."""

    @abc.abstractmethod
    def last(
        self, extended: Shaped[Array, " extended *channels"], history: int
    ) -> Shaped[Array, "..."]:
        """The last rows of every sequence, `(*rows, history, *channels)`."""

    @abc.abstractmethod
    def layers_first(self, state: PyTree) -> PyTree:
        """Of a stack's state: from an axis of sequences, then one of layers, to the reverse."""


class Whole(AbstractTimeline):
    """One sequence."""

    recurrent: Callable
    length: int

    def positions(self, start):
        return start + jnp.arange(self.length, dtype=start.dtype)

    def end(self, start):
        return start + self.length

    def extend(self, history, x):
        return jnp.concatenate([history, x])

    def at_tokens(self, y, history):
        del history
        return y

    def last(self, extended, history):
        return extended[self.length : self.length + history]

    def layers_first(self, state):
        return state


class Packed(AbstractTimeline):
    """Sequences packed one after the other. Padding counts as one sequence more."""

    recurrent: Callable
    length: int
    cu_seqlens: Int[Array, " boundaries"]

    @property
    def sequence(self) -> Int[Array, " seq"]:
        return sequence_of_token(self.cu_seqlens, self.length)

    def positions(self, start):
        first = jnp.append(start - self.cu_seqlens[:-1], 0)
        return first[self.sequence] + jnp.arange(self.length, dtype=start.dtype)

    def end(self, start):
        return start + jnp.diff(self.cu_seqlens)

    def _bounds(self, history: int) -> Int[Array, " boundaries"]:
        """Where the sequences begin and end once each is extended."""
        return self.cu_seqlens + history * jnp.arange(self.cu_seqlens.shape[0], dtype=jnp.int32)

    def extend(self, history, x):
        N, M = history.shape[:2]
        channels = x.shape[1:]
        bounds = self._bounds(M)
        row = jnp.arange(self.length + (N + 1) * M, dtype=jnp.int32)
        n = jnp.searchsorted(bounds[1:], row, side="right").astype(jnp.int32)
        offset = row - bounds[n]
        source = jnp.concatenate(
            [history.reshape(N * M, *channels), jnp.zeros((M, *channels), x.dtype), x]
        )
        return source[jnp.where(offset < M, n * M + offset, row + (N - n) * M)]

    def at_tokens(self, y, history):
        return y[jnp.arange(self.length, dtype=jnp.int32) + self.sequence * history]

    def last(self, extended, history):
        ends = self._bounds(history)[1:]
        return extended[ends[:, None] + jnp.arange(-history, 0, dtype=jnp.int32)[None]]

    def layers_first(self, state):
        return jax.tree.map(lambda x: x.swapaxes(0, 1), state)


def sequence_timeline(
    length: int, cu_seqlens: Int[Array, " boundaries"] | None, method: AbstractMethod
) -> AbstractTimeline:
    def run(q, k, v, h, **gates):
        return run_recurrence(
            "time.recurrent",
            q,
            k,
            v,
            initial_state=h,
            cu_seqlens=cu_seqlens,
            known_boundaries=True,
            chunk_size=None,
            method=method,
            **gates,
        )

    return Whole(run, length) if cu_seqlens is None else Packed(run, length, cu_seqlens)


def token_timeline() -> AbstractTimeline:
    return Whole(_run_token, 1)


def _run_token(
    q: Float[Array, "1 heads key"],
    k: Float[Array, "1 kv_heads key"],
    v: Float[Array, "1 kv_heads value"],
    h: Float[Array, "heads key value"],
    g: Float[Array, "1 heads"] | None = None,
    gk: Float[Array, "1 heads key"] | None = None,
    gv: Float[Array, "1 heads value"] | None = None,
    **fixed,
):
    g, gk, gv = (None if gate is None else gate[0] for gate in (g, gk, gv))
    o, h = step(h, q[0], k[0], v[0], g=g, gk=gk, gv=gv, **fixed)
    return o[None], h
