from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._inputs import count
from ._conv import ShortConvolution
from ._linear import apply_linear, Init, make_linear
from ._state import RecurrentState
from ._timeline import AbstractTimeline


def head_size(
    argument: str, given: int | None, channels: int, num_heads: int, *, even: bool = False
) -> int:
    """What was given, or else `channels` dealt out to the heads."""
    num_heads = count("`num_heads`", num_heads)
    if given is None and channels % num_heads != 0:
        raise ValueError(
            f"{channels} channels cannot be dealt out to {num_heads} heads evenly. Pass "
            f"`{argument}`, or another number of heads."
        )
    size = channels // num_heads if given is None else count(f"`{argument}`", given)
    if even and size % 2 != 0:
        raise ValueError(f"`{argument}` has to be even, for channels to rotate in pairs: {size}.")
    return size


def count_heads(channels: int, argument: str, head_size: int) -> int:
    """How many heads share `channels`, where the caller has not said it."""
    head_size = count(f"`{argument}`", head_size)
    if channels % head_size != 0:
        raise ValueError(
            f"{channels} channels do not make a whole number of heads of {head_size} channels. "
            "Pass `num_heads`."
        )
    return channels // head_size


class QueryKeyValue(eqx.Module):
    """Queries, keys and values of every head: one projection, then the short convolution."""

    linear: eqx.nn.Linear
    conv: ShortConvolution | None
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int,
        num_kv_heads: int | None,
        key_size: int,
        value_size: int,
        conv_size: int | None = None,
        *,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `size`: channels of the input.
        - `num_heads`, `num_kv_heads`: of the queries, and of the keys and values. `None`: as many.
        - `key_size`, `value_size`: channels of one head.
        - `conv_size`: taps of the short convolution. `None`: without.
        - `dtype`, `init`, `key`: of the parameters.
        """
        self.num_heads = count("`num_heads`", num_heads)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.num_kv_heads = count("`num_kv_heads`", kv_heads)
        self.key_size = count("`key_size`", key_size)
        self.value_size = count("`value_size`", value_size)
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"`num_kv_heads` ({num_kv_heads}) has to divide `num_heads` ({num_heads}): every "
                "key and value head serves the same number of query heads."
            )
        linear_key, conv_key = jax.random.split(key)
        channels = sum(self._channels)
        self.linear = make_linear(size, channels, dtype=dtype, init=init, key=linear_key)
        self.conv = (
            None
            if conv_size is None
            else ShortConvolution(channels, conv_size, dtype=dtype, key=conv_key)
        )

    @property
    def _channels(self) -> tuple[int, int, int]:
        H, Hkv, K, V = self.num_heads, self.num_kv_heads, self.key_size, self.value_size
        return H * K, Hkv * K, Hkv * V

    @property
    def dtype(self) -> jnp.dtype:
        return self.linear.weight.dtype

    @property
    def history_shape(self) -> tuple[int, int] | None:
        """Of what the convolution keeps in the state."""
        return None if self.conv is None else self.conv.history_shape

    def zero_state(self) -> RecurrentState:
        """The state before the first token of a layer that has these queries, keys and values."""
        hidden = (self.num_heads, self.key_size, self.value_size)
        return RecurrentState.zeros(hidden, self.history_shape, self.dtype)

    def __call__(
        self,
        x: Float[Array, "seq dim"],
        history: Float[Array, "*rows history channels"] | None,
        time: AbstractTimeline,
    ) -> tuple[
        Float[Array, "seq heads key"],
        Float[Array, "seq kv_heads key"],
        Float[Array, "seq kv_heads value"],
        Float[Array, "*rows history channels"] | None,
    ]:
        """**Arguments:**

        - `x`: the input, one row for every token.
        - `history`: `state.conv`, the last inputs of the convolution.
        - `time`: as in `run` of [`linrec.nn.AbstractLayer`][].

        **Returns:** `(q, k, v, history)`.
        """
        qkv = apply_linear(self.linear, x)
        if self.conv is not None:
            qkv, history = self.conv(qkv, history, time)
        q_end, k_end = self._channels[0], sum(self._channels[:2])
        q, k, v = jnp.split(qkv, (q_end, k_end), axis=-1)
        T = x.shape[0]
        return (
            q.reshape(T, self.num_heads, self.key_size),
            k.reshape(T, self.num_kv_heads, self.key_size),
            v.reshape(T, self.num_kv_heads, self.value_size),
            history,
        )
