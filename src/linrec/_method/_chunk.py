"""What happens inside chunks. Equation numbers are those of the mathematics page."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._gates import FORGET
from ._products import for_each_chunk, Product, scale_rows, sum_rows


# While the log-decays of a block, of keys and values together, sum up to less than this, factors
# e^A and e^-A are exact to rounding and far from overflow.
_ORDINARY = 32.0
# The gradient of a gate is a difference of sums. Where all decays of a token together are weaker
# than this, digits are left.
_ORDINARY_GATE = 2.0
# Tokens of the blocks in which gates per token are added up by one product.
_SMALL = 16


class Chunks(eqx.Module):
    """Consecutive chunks of one sequence, as they lie in memory."""

    q: Float[Array, "batch seq heads key"]
    k: Float[Array, "batch seq heads key"]
    v: Float[Array, "batch seq heads value"]
    g: Float[Array, "batch seq_or_chunk heads 1"] | None
    """Of one chunk, if it is the same for all."""
    gk: Float[Array, "batch seq heads key"] | None
    gv: Float[Array, "batch seq heads value"] | None
    size: int = eqx.field(static=True)
    """Tokens of a chunk."""
    product: Product = eqx.field(static=True)

    @property
    def number(self) -> int:
        return self.q.shape[1] // self.size

    def cut(self, x: Float[Array, "batch seq heads x"]) -> Float[Array, "batch n chunk heads x"]:
        B, _, H, X = x.shape
        return x.reshape(B, -1, self.size, H, X)

    def heads_first(self, x: Float[Array, "batch seq heads x"]):
        return _swap_heads(self.cut(x))

    def heads_last(self, x: Float[Array, "batch n heads chunk x"]):
        B, _, H, _, X = x.shape
        return _swap_heads(x).reshape(B, -1, H, X)

    def is_ordinary(self) -> Bool[Array, ""]:
        """Whether gates per channel are weak enough for `effect_of_ordinary_gates`."""
        reach = _ORDINARY / sum(g is not None for g in (self.gk, self.gv))
        gates = [(self.g, jnp.inf), (self.gk, reach), (self.gv, reach)]
        gates = [(jnp.abs(self.cut(g)), reach) for g, reach in gates if g is not None]
        limit = _ORDINARY_GATE / len(gates)
        # One pass: a sum that is infinite where a gate is too strong by itself.
        sums = [(jnp.sum(jnp.where(g < limit, g, jnp.inf), -3), reach) for g, reach in gates]
        return jnp.stack([jnp.all(g < reach) for g, reach in sums]).all()


class Read(eqx.Module):
    """What chunks read: linear in the states before them, (3)."""

    inside: Float[Array, "*chunks heads chunk value"]
    """Of the chunk itself."""
    q: Float[Array, "*chunks heads chunk key"]
    """What reads the state, decayed from the start."""
    decay_value: Float[Array, "*chunks heads chunk value"] | None
    product: Product = eqx.field(static=True)

    def __call__(self, h: Float[Array, "*chunks heads key value"]) -> Array:
        past = self.product("ik,kv->iv", self.q, h)
        return self.inside + (past if self.decay_value is None else past * self.decay_value)


class Decay(eqx.Module):
    """Of states, by rows and by columns."""

    key: Float[Array, "*chunks heads key 1"] | None = None
    value: Float[Array, "*chunks heads 1 value"] | None = None

    def __call__(self, h: Float[Array, "*chunks heads key value"]) -> Array:
        return self._of_values(self._of_keys(h))

    def gradient(self, h: Array, d_decayed: Array) -> "Decay":
        """From states and the gradient of the decayed ones."""
        return Decay(
            None if self.key is None else sum_rows(self._of_values(h) * d_decayed),
            None if self.value is None else _sum_columns(self._of_keys(h) * d_decayed),
        )

    def gradient_from(self, decayed: Array, d_decayed: Array) -> "Decay":
        """The same from the decayed states, (6), where no decay is 0."""
        products = decayed * d_decayed
        return Decay(
            None if self.key is None else sum_rows(products) / self.key,
            None if self.value is None else _sum_columns(products) / self.value,
        )

    def _of_keys(self, h: Array) -> Array:
        return h if self.key is None else scale_rows(h, self.key)

    def _of_values(self, h: Array) -> Array:
        return h if self.value is None else h * self.value


class Write(eqx.Module):
    """The states after chunks: linear in those before them, (4)."""

    decay: Decay
    """Of the state, before anything is written."""
    written: Float[Array, "*chunks heads key value"]
    late_decay: Decay
    """Of the state and of what is written, which is larger for it."""

    @property
    def keeps_everything(self) -> bool:
        return not jax.tree.leaves((self.decay, self.late_decay))

    def __call__(self, h: Float[Array, "*chunks heads key value"]) -> Array:
        return self.late_decay(self.decay(h) + self.written)

    def transposed(self, d_after: Float[Array, "*chunks heads key value"]) -> Array:
        """The gradient of the states before, from that of the states after."""
        return self.decay(self.late_decay(d_after))

    def gradient(self, before: Array, after: Array | None, d_after: Array) -> "Write":
        """From states that are known: what was written need not be computed again.

        Those after are asked for with gates per channel only.
        """
        d_written = self.late_decay(d_after)
        d_decay = self.decay.gradient(before, d_written)
        d_late = Decay() if after is None else self.late_decay.gradient_from(after, d_after)
        return Write(d_decay, d_written, d_late)


def effect_of_ordinary_gates(chunks: Chunks) -> tuple[Read, Write]:
    """Gates per channel as products of two factors, (5), gates per token as a matrix of decays."""
    q, k, v = map(chunks.heads_first, (chunks.q, chunks.k, chunks.v))
    decay = decay_key = decay_value = after_read = to_end = None
    if chunks.gk is None:
        scores = chunks.product("ik,jk->ij", q, k)
    else:
        sums = _swap_heads(jnp.asarray(cumulative(chunks.cut(chunks.gk))))
        decayed_q, decayed_k = q * jnp.exp(sums), k * jnp.exp(-sums)
        scores = jnp.asarray(_decayed_scores(chunks.product, q, k, decayed_q, decayed_k))
        q, k = decayed_q, decayed_k
        decay_key = column(jnp.exp(sums[..., -1:, :]), k.shape[-1])
    if chunks.g is not None:
        g = chunks.heads_first(chunks.g)
        between, from_start, to_end = _sums(g)
        decays = (jnp.exp(x) for x in (between[..., 0], from_start, to_end))
        if g.shape[1] < chunks.number:
            decays = (jnp.asarray(for_each_chunk(x, chunks.number)) for x in decays)
        of_pairs, from_start, to_end = decays
        scores = scores * of_pairs
        q = scale_rows(q, from_start)
        decay = column(from_start[..., -1:, :], k.shape[-1])
    scores = jnp.tril(scores)
    if chunks.gv is None:
        inside = chunks.product("ij,jv->iv", scores, v)
    else:
        sums = _swap_heads(jnp.asarray(cumulative(chunks.cut(chunks.gv))))
        # As in `_decayed_scores`, what a token reads of itself has no decay in it.
        own = _diagonal(scores) * v
        after_read, v = jnp.exp(sums), v * jnp.exp(-sums)
        others = chunks.product("ij,jv->iv", jnp.tril(scores, -1), v)
        inside = others * after_read + own
        decay_value = jnp.exp(sums[..., -1:, :])
    # Of the two factors of what is written, values are the one that is not transposed.
    written = chunks.product("jk,jv->kv", k, v if to_end is None else scale_rows(v, to_end))
    read = Read(inside, q, after_read, chunks.product)
    return read, Write(Decay(decay), written, Decay(decay_key, decay_value))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decayed_scores(product, q, k, decayed_q, decayed_k) -> Array:
    """(q_i e^A_i) . (k_j e^-A_j): equation (5). Its gradient leaves i = j out of the gates.

    There is no decay in what a token reads of itself: its two halves in the gradient cancel, but on
    paper only. Under strong decay their rounding errors would be all that is left.
    """
    return product("ik,jk->ij", decayed_q, decayed_k)


def _decayed_scores_forward(product, *factors):
    return _decayed_scores(product, *factors), factors


def _decayed_scores_backward(product, factors, d_scores):
    q, k, decayed_q, decayed_k = factors
    d_own = _diagonal(d_scores)
    d_others = jnp.tril(d_scores, -1)
    d_decayed_q = product("ij,jk->ik", d_others, decayed_k)
    d_decayed_k = product("ij,ik->jk", d_others, decayed_q)
    return d_own * k, d_own * q, d_decayed_q, d_decayed_k


_decayed_scores.defvjp(_decayed_scores_forward, _decayed_scores_backward)


def _sums(g: Float[Array, "*rows chunk x"]) -> tuple[Array, Array, Array]:
    """Of the gates between two tokens, from the start up to each token, and after it to the end."""
    between = _sums_between(g)
    return between, _from_start(between, g), _to_end(between)


def _sums_between(g: Float[Array, "*rows chunk x"]) -> Float[Array, "*rows chunk chunk x"]:
    """The sum of `g` after token `j` up to token `i`, at `[i, j]`; zeros where `j >= i`.

    Sums are only ever added. A difference of two cumulative sums would lose digits after a strong
    gate, and everything after `-inf`.
    """
    *rows, C, X = g.shape
    g = jnp.maximum(g, FORGET)
    width = min(C, _SMALL)
    # In blocks of `width` tokens: drop what is not after `j`, add up what is left until `i`.
    until = jnp.tril(jnp.ones((width, width), g.dtype))
    blocks = jnp.broadcast_to(
        g.reshape(*rows, -1, width, 1, X), (*rows, C // width, width, width, X)
    )
    i, j = (jax.lax.broadcasted_iota(jnp.int32, blocks.shape, blocks.ndim - n) for n in (3, 2))
    after = jnp.where(i > j, blocks, 0)
    sums = jnp.einsum("is,...sjx->...ijx", until, after, precision=jax.lax.Precision.HIGHEST)
    while width < C:  # then merge blocks in pairs
        first, second = sums[..., 0::2, :, :, :], sums[..., 1::2, :, :, :]
        between = _from_start(second, g.reshape(*rows, -1, 2, width, X)[..., 1, :, :])
        across = between[..., None, :] + _to_end(first)[..., None, :, :]
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -2)
        lower = jnp.concatenate([across, second], -2)
        sums = jnp.concatenate([upper, lower], -3)
        width *= 2
    return sums[..., 0, :, :, :]


def _from_start(between: Array, g: Array) -> Float[Array, "*rows chunk x"]:
    return between[..., :, 0, :] + g[..., :1, :]


def _to_end(between: Array) -> Float[Array, "*rows chunk x"]:
    return between[..., -1, :, :]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def cumulative(g: Float[Array, "*rows chunk heads x"], reverse: bool = False):
    """Sums of blocks, and inside of them: XLA is slow at `jnp.cumsum` on CPUs."""
    C = g.shape[-3]
    width = 1 << (C.bit_length() - 1) // 2
    inside = sum_until(g.reshape(*g.shape[:-3], C // width, width, *g.shape[-2:]), -3, reverse)
    blocks = inside[..., :1, :, :] if reverse else inside[..., -1:, :, :]
    return (inside + (sum_until(blocks, -4, reverse) - blocks)).reshape(g.shape)


def _cumulative_forward(g, reverse):
    return cumulative(g, reverse), None


def _cumulative_backward(reverse, _, d_sums):
    return (cumulative(d_sums, not reverse),)


cumulative.defvjp(_cumulative_forward, _cumulative_backward)


def sum_until(x: Array, axis: int, reverse: bool) -> Array:
    """As `jnp.cumsum`, one by one: for few."""
    axis, n = axis % x.ndim, x.shape[axis]
    window, padding = [1] * x.ndim, [(0, 0)] * x.ndim
    window[axis], padding[axis] = n, (0, n - 1) if reverse else (n - 1, 0)
    return jax.lax.reduce_window(x, x.dtype.type(0), jax.lax.add, window, [1] * x.ndim, padding)


def _swap_heads(x: Float[Array, "*rows chunk heads x"]) -> Float[Array, "*rows heads chunk x"]:
    return x.swapaxes(-3, -2)


def _diagonal(x: Float[Array, "*rows chunk chunk"]) -> Float[Array, "*rows chunk 1"]:
    *rows, C, _ = x.shape
    return x.reshape(*rows, C * C)[..., :: C + 1, None]


def _sum_columns(x: Float[Array, "*rows n x"]) -> Float[Array, "*rows 1 x"]:
    return jnp.sum(x, -2, keepdims=True)


def column(x: Float[Array, "*rows 1 key_or_1"], K: int) -> Float[Array, "*rows key 1"]:
    return jnp.broadcast_to(x.swapaxes(-1, -2), (*x.shape[:-2], K, 1))
