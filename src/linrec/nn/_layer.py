"""The protocol of every layer: what a user calls, and what the author of a layer writes."""

import abc
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

from .._inputs import check_boundaries
from .._method.base import AbstractMethod
from .._recurrent import choose_method
from .._transform import compiled
from .._types import CuSeqlens
from .._varlen import is_token
from ._precision import wide
from ._state import RecurrentState, repeat_state
from ._timeline import AbstractTimeline, token_timeline


_Layer = TypeVar("_Layer", bound="AbstractLayer")


class AbstractLayer(eqx.Module):
    """Something that maps a sequence to a sequence and carries a state along it.

    Layers are immutable and unbatched: batch them with `jax.vmap`. They hold the state that they
    start from.

    !!! example

        ```python
        import jax
        import linrec

        layer = linrec.nn.Retention(64, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (100, 64))

        y, state = layer(x)                   # a whole sequence, from the state the layer holds
        y, state = layer(x, state)            # go on from a state
        y_t, state = layer.step(x[0], state)  # one token
        layer = layer.with_state(state)       # a new layer that holds `state`
        ```

    To write a new kind of layer, subclass [`linrec.nn.AbstractMixer`][] and define `run`.
    """

    state: eqx.AbstractVar[PyTree]
    """The state that sequences start from."""

    @property
    @abc.abstractmethod
    def token_shape(self) -> tuple[int, ...]:
        """Of the input at one token: its channels, or nothing for a token number."""

    @abc.abstractmethod
    def initial_state(self) -> PyTree:
        """`state`, with the gradient stopped where it is not to be trained."""

    @abc.abstractmethod
    def run(
        self, x: Shaped[Array, " seq *dim"], state: PyTree, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq out"], PyTree]:
        """What the layer does, written once for whole sequences, packed ones, and single tokens.

        It is called under `jax.jit`.

        **Arguments:**

        - `x`: one row for every token.
        - `state`: where to start from.
        - `time`: everything that looks along the sequence axis goes through it.
            `time.recurrent(q, k, v, hidden, ...)` is [`linrec.recurrent`][] from the state
            `hidden`, with `g`, `gk`, `gv`, `g_gamma` and `softmax_scale` by name.
            `time.positions(state.position)` is each token's place in its sequence, and
            `time.end(state.position)` the position after the last.

        **Returns:** the output, one row for every token, and the state after the last.
        """

    def __call__(
        self,
        x: Shaped[Array, " seq *dim"],
        state: PyTree | None = None,
        *,
        cu_seqlens: CuSeqlens | None = None,
        chunk_size: int | None = None,
        method: AbstractMethod | None = None,
    ) -> tuple[Float[Array, "seq out"], PyTree]:
        """Runs a sequence.

        **Arguments:**

        - `x`: `(seq, channels)`; for a language model `(seq,)` token numbers.
        - `state`: where to start from. Defaults to the state that the layer holds.
        - `cu_seqlens`: boundaries of sequences packed along `seq`, as in [`linrec.recurrent`][].
            The states, the one given and the one returned, then have an axis `num_seqs` in front.
            The state that the layer holds is every sequence's start.
        - `chunk_size`, `method`: as in [`linrec.recurrent`][].

        **Returns:** `(y, state)`: the output, one row for every token, and the state at the end.
        """
        x = _check_input(self, "(x)", x, ("seq",))
        rows = None
        if cu_seqlens is not None:  # here, for layers without a recurrence too
            cu_seqlens = check_boundaries(type(self).__name__, cu_seqlens, x.shape[0])
            rows = cu_seqlens.shape[0] - 1
        state = _check_state(self, "(x, state)", state, rows)
        method = choose_method(type(self).__name__, method, chunk_size)
        return _run(method, self, x, state, cu_seqlens)

    def step(
        self, x: Shaped[Array, "*dim"], state: PyTree | None = None
    ) -> tuple[Float[Array, " out"], PyTree]:
        """Runs one token. Scanned over a sequence it gives what `__call__` gives.

        **Arguments:**

        - `x`: `(channels,)`; for a language model one token number.
        - `state`: as in `__call__`.

        **Returns:** `(y, state)`: the output for this token and the state after it.
        """
        x = _check_input(self, ".step(x)", x, ())
        state = _check_state(self, ".step(x, state)", state, None)
        return _run_token(self, x, state)

    def with_state(self: _Layer, state: PyTree) -> _Layer:
        """A new layer that holds `state`, and is the same otherwise."""
        state = _check_state(self, ".with_state(state)", state, None)
        return eqx.tree_at(lambda layer: layer.state, self, state)


class AbstractMixer(AbstractLayer):
    """A layer that holds its state itself: the part of a [`linrec.nn.Block`][] that mixes tokens.

    A new kind of mixer is a subclass with a `run`. It holds the parts it needs, for example
    [`linrec.nn.QueryKeyValue`][] and [`linrec.nn.Output`][]. The class variable `fixed` names those
    of its fields that are not to be trained, see [`linrec.nn.trainable`][].
    """

    size: eqx.AbstractVar[int]
    """Channels of the input and the output."""
    trainable_state: eqx.AbstractVar[bool]
    """Whether `state` is a parameter."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """The names of other fields that are no parameters."""

    @property
    def token_shape(self) -> tuple[int, ...]:
        return (self.size,)

    def initial_state(self) -> PyTree:
        is_recurrent = lambda x: isinstance(x, RecurrentState)

        def widen(x):
            return RecurrentState(wide(x.hidden), x.conv, x.position) if is_recurrent(x) else x

        state = self.state if self.trainable_state else jax.lax.stop_gradient(self.state)
        # Whoever casts a model to half precision casts the state that it holds too.
        state = jax.tree.map(widen, state, is_leaf=is_recurrent)
        # A copy, so that whoever donates it does not take it from the layer.
        return jax.tree.map(jnp.copy, state)


@compiled
def _run(method: AbstractMethod, layer: AbstractLayer, x: Array, state: PyTree, cu_seqlens):
    if cu_seqlens is not None and eqx.is_inexact_array(x):
        # Padding may hold anything, but gradients of parameters multiply it by zeros.
        x = jnp.where(is_token(cu_seqlens, x.shape[0])[:, None], x, jnp.zeros_like(x))
    return method.run_layer(layer, x, state, cu_seqlens)


@compiled
def _run_token(layer: AbstractLayer, x: Array, state: PyTree):
    y, state = layer.run(x[None], state, token_timeline())
    return y[0], state


def _check_input(layer: AbstractLayer, call: str, x: Any, axes: tuple[str, ...]) -> Array:
    x, channels = jnp.asarray(x), layer.token_shape
    if x.ndim != len(axes + channels) or x.shape[len(axes) :] != channels:
        expected = ", ".join(axes + tuple(map(str, channels))) + "," * (len(axes + channels) == 1)
        raise ValueError(
            f"`{type(layer).__name__}{call}` expects `x` of shape ({expected}), but it has shape "
            f"{x.shape}. Layers are unbatched: for a batch, use `jax.vmap`."
        )
    kind = jnp.floating if channels else jnp.integer
    if not jnp.issubdtype(x.dtype, kind):
        raise TypeError(
            f"`{type(layer).__name__}{call}` expects `x` of {kind.__name__} dtype, but it has "
            f"dtype {x.dtype}."
        )
    return x


def _check_state(layer: AbstractLayer, call: str, state: Any, rows: int | None) -> Any:
    def default():
        state = layer.initial_state()
        return state if rows is None else repeat_state(state, rows)

    if state is None:
        return default()
    expected = jax.eval_shape(default)
    if _shapes(state) != _shapes(expected):
        packed = "" if rows is None else f" for {rows} packed sequences"
        raise ValueError(
            f"`{type(layer).__name__}{call}` expects{packed} a state of the shapes\n"
            f"{eqx.tree_pformat(expected)}\nbut got\n{eqx.tree_pformat(state)}\n"
            "Pass a state that this layer returned; for a batch of states, use `jax.vmap`."
        )
    return state


def _shapes(state: Any) -> tuple[Any, list[tuple[int, ...]]]:
    leaves, structure = jax.tree.flatten(state)
    return structure, [jnp.shape(leaf) for leaf in leaves]
