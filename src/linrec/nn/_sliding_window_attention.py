from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._inputs import count, positive
from ._layer import AbstractMixer
from ._linear import Init
from ._output import Output
from ._precision import wide_dtype
from ._projection import head_size, QueryKeyValue
from ._rotary import rotate
from ._state import make_exportable
from ._timeline import AbstractTimeline


class WindowState(eqx.Module):
    """What sliding-window attention remembers: the keys and values that are still in sight."""

    keys: Float[Array, "*rows history kv_heads key"]
    """Of the last `window - 1` tokens, rotated: `(window - 1, kv_heads, key)`."""
    values: Float[Array, "*rows history kv_heads value"]
    """Of the same tokens: `(window - 1, kv_heads, value)`."""
    position: Int[Array, "*rows"]
    """How many tokens it has seen."""

    @staticmethod
    def zeros(
        keys: tuple[int, int, int], values: tuple[int, int, int], dtype: jnp.dtype
    ) -> "WindowState":
        """The state before the first token. `keys` and `values` are shapes."""
        return WindowState(
            jnp.zeros(keys, dtype), jnp.zeros(values, dtype), jnp.zeros((), jnp.int32)
        )


make_exportable(WindowState, lambda: WindowState.zeros((1, 1, 1), (1, 1, 1), jnp.dtype("float32")))


class SlidingWindowAttention(AbstractMixer):
    r"""Softmax attention to the last `window` tokens, with rotary position embedding.

    $$o_t = \sum\nolimits_{t - W < s \le t} \operatorname{softmax}_s(K^{-1/2} q_t^\top k_s)\, v_s$$

    It takes the place of a recurrent layer every now and then in hybrid models. Time and memory
    are linear in the length of the sequence.
    """

    qkv: QueryKeyValue
    output: Output
    state: WindowState
    size: int = eqx.field(static=True)
    window: int = eqx.field(static=True)
    rotary_base: float = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        *,
        window: int,
        rotary_base: float = 10_000.0,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `window`: how many tokens a token sees, itself included.
        - `rotary_base`: as in [`linrec.nn.Retention`][].
        - The others: as those of [`linrec.nn.GatedLinearAttention`][]; `key_size` defaults to
            `size / num_heads`.
        """
        window = count("`SlidingWindowAttention(..., window=...)`", window)
        K = head_size("key_size", key_size, size, num_heads, even=True)
        V = head_size("value_size", value_size, size, num_heads)
        qkv_key, output_key = jax.random.split(key)
        options = {"dtype": dtype, "init": init}
        self.qkv = QueryKeyValue(size, num_heads, num_kv_heads, K, V, key=qkv_key, **options)
        self.output = Output(size, num_heads, V, key=output_key, **options)
        self.size = size
        self.window = window
        self.rotary_base = positive("`rotary_base`", rotary_base)
        self.trainable_state = False
        history = (window - 1, self.qkv.num_kv_heads)
        self.state = WindowState.zeros((*history, K), (*history, V), self.qkv.dtype)

    def run(
        self, x: Float[Array, "seq dim"], state: WindowState, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], WindowState]:
        M = self.window - 1
        q, k, v, _ = self.qkv(x, None, time)
        positions = time.positions(state.position)
        q, k = rotate(q, positions, self.rotary_base), rotate(k, positions, self.rotary_base)
        keys = time.extend(state.keys.astype(k.dtype), k)
        values = time.extend(state.values.astype(v.dtype), v)
        no_query = jnp.zeros((*state.keys.shape[:-2], *q.shape[1:]), q.dtype)
        queries = time.extend(no_query, q)[M:]
        # The history of a young sequence reaches back to before its first token.
        past = jnp.expand_dims(state.position, -1) + jnp.expand_dims(
            jnp.arange(-M, 0, dtype=jnp.int32), range(state.position.ndim)
        )
        exists = time.extend(past, positions) >= 0
        o = time.at_tokens(_attend(queries, keys, values, exists, self.window), M)
        state = WindowState(time.last(keys, M), time.last(values, M), time.end(state.position))
        return self.output(o, x), state


def _attend(
    q: Float[Array, "queries heads key"],
    k: Float[Array, "rows kv_heads key"],
    v: Float[Array, "rows kv_heads value"],
    exists: Bool[Array, " rows"],
    window: int,
) -> Float[Array, "queries heads value"]:
    """Query `i` attends to those of the rows `i` to `i + window - 1` that exist.

    One block of `window` queries after the other, which see no more than two blocks of rows.
    """
    T = q.shape[0]
    size = max(min(T, window), 1)
    blocks = max(-(-T // size), 1)
    seen = size + window - 1
    pad = lambda x: jnp.pad(x, ((0, blocks * size - T), *((0, 0),) * (x.ndim - 1)))
    q, k, v, exists = map(pad, (q, k, v, exists))
    distance = jnp.arange(seen)[None] - jnp.arange(size)[:, None]
    in_window = (distance >= 0) & (distance < window)

    @jax.checkpoint
    def attend_block(block):
        cut = lambda x, rows: jax.lax.dynamic_slice_in_dim(x, block * size, rows)
        mask = in_window & cut(exists, seen)[None]
        return _softmax_attention(cut(q, size), cut(k, seen), cut(v, seen), mask)

    if blocks == 1:  # as it is in decoding
        return attend_block(0)[:T]
    o = jax.lax.map(attend_block, jnp.arange(blocks))
    return o.reshape(blocks * size, *o.shape[2:])[:T]


def _softmax_attention(
    q: Float[Array, "queries heads key"],
    k: Float[Array, "rows kv_heads key"],
    v: Float[Array, "rows kv_heads value"],
    mask: Bool[Array, "queries rows"],
) -> Float[Array, "queries heads value"]:
    # `jax.nn.dot_product_attention` computes float64 in float32.
    T, H, K = q.shape
    q = q.reshape(T, k.shape[1], H // k.shape[1], K)
    dtype = wide_dtype(q.dtype)
    scores = jnp.einsum("thgk,shk->hgts", q, k, preferred_element_type=dtype) * K**-0.5
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, jnp.finfo(dtype).min))
    o = jnp.einsum("hgts,shv->thgv", weights.astype(v.dtype), v, preferred_element_type=dtype)
    return o.reshape(T, H, v.shape[-1]).astype(v.dtype)
