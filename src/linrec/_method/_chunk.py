"""What happens inside chunks. Equation numbers are those of the mathematics page."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ._gates import balanced, FORGET
from ._products import for_each_chunk, Product, scale_rows, sum_rows


# While the log-decays of a block, of keys and values together, sum up to less than this, factors
# e^A and e^-A are exact to rounding and far from overflow.
_ORDINARY = 32.0
# The gradient of a gate is a difference of sums. Where all decays of a token together are weaker
# than this, digits are left.
_ORDINARY_GATE = 2.0
# Tokens of the blocks that chunks are cut into where their gates are not ordinary.
_SMALL = 16


class Chunks(eqx.Module):
    """Consecutive chunks of one sequence, as they lie in memory.

    Cut only where they are worked on: cut before a branch, XLA would copy them for each side of it.
    """

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
        """Whether gates per channel are weak enough for `effect`."""
        reach = _ORDINARY / sum(g is not None for g in (self.gk, self.gv))
        gates = [(self.g, jnp.inf), (self.gk, reach), (self.gv, reach)]
        gates = [(jnp.abs(self.cut(g)), reach) for g, reach in gates if g is not None]
        limit = _ORDINARY_GATE / len(gates)
        ordinary = [(jnp.max(g, -3) < limit) & (jnp.sum(g, -3) < reach) for g, reach in gates]
        return jnp.stack([jnp.all(x) for x in ordinary]).all()


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


class Write(eqx.Module):
    """The states after chunks: linear in those before them, (4)."""

    decay: Float[Array, "*chunks heads key 1"] | None
    """Of the state, before anything is written."""
    written: Float[Array, "*chunks heads key value"]
    decay_key: Float[Array, "*chunks heads key 1"] | None
    """Of the state, and of what is written, which is larger for it."""
    decay_value: Float[Array, "*chunks heads 1 value"] | None

    @property
    def keeps_everything(self) -> bool:
        return self.decay is None and self.decay_key is None and self.decay_value is None

    def __call__(self, h: Float[Array, "*chunks heads key value"]) -> Array:
        h = h if self.decay is None else scale_rows(h, self.decay)
        return self._decayed(h + self.written)

    def transposed(self, d_after: Float[Array, "*chunks heads key value"]) -> Array:
        """The gradient of the states before, from that of the states after."""
        d_h = self._decayed(d_after)
        return d_h if self.decay is None else scale_rows(d_h, self.decay)

    def gradient(self, before: Array, after: Array | None, d_after: Array) -> "Write":
        """From states that are known: what was written need not be computed again, (6).

        Those after are asked for with gates per channel only.
        """
        d_written = self._decayed(d_after)
        d_decay = None if self.decay is None else sum_rows(before * d_written)
        d_decay_key = d_decay_value = None
        if after is not None:
            of_decays = after * d_after
            if self.decay_key is not None:
                d_decay_key = sum_rows(of_decays) / self.decay_key
            if self.decay_value is not None:
                d_decay_value = jnp.sum(of_decays, -2, keepdims=True) / self.decay_value
        return Write(d_decay, d_written, d_decay_key, d_decay_value)

    def _decayed(self, h: Array) -> Array:
        h = h if self.decay_key is None else scale_rows(h, self.decay_key)
        return h if self.decay_value is None else h * self.decay_value


def effect(chunks: Chunks) -> tuple[Read, Write]:
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
        decay_key = _column(jnp.exp(sums[..., -1:, :]))
    if chunks.g is not None:
        g = chunks.heads_first(chunks.g)
        between, from_start, to_end = _sums(g)
        decays = (jnp.exp(x) for x in (between[..., 0], from_start, to_end))
        if g.shape[1] < chunks.number:
            decays = (jnp.asarray(for_each_chunk(x, chunks.number)) for x in decays)
        of_pairs, from_start, to_end = decays
        scores = scores * of_pairs
        q = scale_rows(q, from_start)
        decay = jnp.broadcast_to(from_start[..., -1:, :], (*k.shape[:-2], k.shape[-1], 1))
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
    return read, Write(decay, written, decay_key, decay_value)


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


def in_small_blocks(chunks: Chunks, h: Float[Array, "batch heads key value"]):
    """Cuts chunks into blocks, so that only those with extreme gates pay for them."""
    width = min(chunks.size, _SMALL)
    blocks = dataclasses.replace(chunks, size=width)

    def cut(x: Array) -> Array:
        return blocks.cut(x).swapaxes(0, 1)

    def factorised(block: Chunks, h: Array) -> tuple[Array, Array]:
        read, write = effect(block)
        return block.heads_last(read(h)), write(h)

    @jax.checkpoint
    def body(h, block):
        o, h = jax.lax.cond(block.is_ordinary(), factorised, _explicit, block, h)
        return h, o

    if chunks.q.shape[1] == width:  # one block: not ordinary, or of few tokens
        o, h_next = _explicit(chunks, h[:, None])
        return o, h_next[:, 0]
    h, o = jax.lax.scan(body, h[:, None], jax.tree.map(cut, blocks))
    return o.swapaxes(0, 1).reshape(*chunks.q.shape[:3], -1), h[:, 0]


def _explicit(chunks: Chunks, h: Array) -> tuple[Array, Array]:
    """Every decay by itself, from sums of the gates between two tokens: exact for any gate."""
    q, k, v = map(chunks.heads_first, (chunks.q, chunks.k, chunks.v))
    over_key = [chunks.heads_first(g) for g in (chunks.g, chunks.gk) if g is not None]
    gk = _sums(sum(over_key[1:], start=over_key[0])) if over_key else None
    gv = None if chunks.gv is None else _sums(chunks.heads_first(chunks.gv))
    if gk is not None and gv is not None:
        gk, gv = zip(*map(balanced, gk, gv), strict=True)
    decayed_q, decayed_k, h_next = q, k, h
    pairs = q[..., :, None, :] * k[..., None, :, :]
    if gk is not None:
        between, from_start, to_end = map(jnp.exp, gk)
        pairs = pairs * between
        decayed_q, decayed_k = q * from_start, k * to_end
        h_next = h * _column(from_start[..., -1:, :])
    scores = jnp.tril(jnp.sum(pairs, -1))[..., None]
    writes = scores * v[..., None, :, :]
    past = chunks.product("ik,kv->iv", decayed_q, h)
    if gv is not None:
        between, from_start, to_end = map(jnp.exp, gv)
        writes = writes * between
        past, v = past * from_start, v * to_end
        h_next = h_next * from_start[..., -1:, :]
    o = chunks.heads_last(jnp.sum(writes, -2) + past)
    return o, h_next + chunks.product("jk,jv->kv", decayed_k, v)


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


def _column(x: Float[Array, "*rows 1 key"]) -> Float[Array, "*rows key 1"]:
    return x.swapaxes(-1, -2)
