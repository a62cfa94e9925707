"""What happens inside one chunk. Equation numbers are those of the mathematics page."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


# While the log-decays of a block sum up to less than this, factors e^A and e^-A are exact to
# rounding and far from overflow.
_ORDINARY = 40.0
# Stands for -inf: e^g is 0 all the same, and a product with 0 is not NaN.
_FORGET = -1e30
# Tokens of the blocks that a chunk is cut into where its gates are not ordinary.
_SMALL = 16


class Chunk(eqx.Module):
    """Consecutive tokens of one sequence, ready for matrix products."""

    q: Float[Array, "batch heads chunk key"]
    k: Float[Array, "batch heads chunk key"]
    v: Float[Array, "batch heads chunk value"]
    g: Float[Array, "batch heads chunk 1"] | None
    gk: Float[Array, "batch heads chunk key"] | None
    gv: Float[Array, "batch heads chunk value"] | None
    precision: jax.lax.Precision = eqx.field(static=True)

    def dot(self, equation: str, x: Array, y: Array) -> Array:
        return jnp.einsum(equation, x, y, precision=self.precision)

    def is_ordinary(self) -> Bool[Array, ""]:
        """Whether per-channel gates, if any, are weak enough for `_factorised`."""
        reach = [jnp.max(jnp.sum(jnp.abs(x), -2)) for x in (self.gk, self.gv) if x is not None]
        return jnp.array(True) if not reach else jnp.stack(reach).max() < _ORDINARY

    def form(self) -> Int[Array, ""]:
        """Which of `chunk_forms` to take."""
        return 1 - self.is_ordinary().astype(jnp.int32)


def chunk_forms(size: int, per_channel: bool) -> list:
    """The functions `(chunk, h) -> (o, h)` for chunks that are ordinary, and for the others."""
    if not per_channel:
        return [_by_decay_matrix]
    return [_factorised, _explicit if size <= _SMALL else _in_small_blocks]


def _by_decay_matrix(chunk: Chunk, h: Array) -> tuple[Array, Array]:
    """No gate per channel: one decay for each pair of tokens, at any strength."""
    scores = chunk.dot("bhik,bhjk->bhij", chunk.q, chunk.k)
    scores, past, h = _decay(chunk, scores, h)
    return chunk.dot("bhij,bhjv->bhiv", scores, chunk.v) + past, h


def _decay(chunk: Chunk, scores: Array, h: Array) -> tuple[Array, Array, Array]:
    """Gives what is read of the chunk, what is read of the past, and the next state."""
    past, k = chunk.dot("bhik,bhkv->bhiv", chunk.q, h), chunk.k
    if chunk.g is not None:
        between = _sums_between(chunk.g)
        from_start = _from_start(between, chunk.g)
        scores = scores * jnp.exp(between[..., 0])
        past = _scale_rows(past, jnp.exp(from_start))
        k = _scale_rows(k, jnp.exp(_to_end(between)))
        h = _scale_rows(h, jnp.broadcast_to(jnp.exp(from_start[..., -1:, :]), (*h.shape[:-1], 1)))
    return jnp.tril(scores), past, h + chunk.dot("bhjk,bhjv->bhkv", k, chunk.v)


def _factorised(chunk: Chunk, h: Array) -> tuple[Array, Array]:
    """e^(A_i - A_j) as a product of two factors, then as if there were no gates per channel."""
    q, k, v = chunk.q, chunk.k, chunk.v
    after = jnp.ones((*h.shape[:-1], 1), h.dtype)
    if chunk.gk is None:
        scores = chunk.dot("bhik,bhjk->bhij", q, k)
    else:
        reach, middle = _reach(chunk.gk)
        scores = jnp.asarray(_decayed_scores(chunk.precision, q, k, reach))
        q, k = q * jnp.exp(reach), k * jnp.exp(-reach)
        h = h * _column(jnp.exp(middle))
        after = _column(jnp.exp(reach[..., -1:, :]))
    if chunk.gv is None:
        without = Chunk(q, k, v, chunk.g, None, None, chunk.precision)
        scores, past, h = _decay(without, scores, h)
        return chunk.dot("bhij,bhjv->bhiv", scores, v) + past, _scale_rows(h, after)
    reach, middle = _reach(chunk.gv)
    without = Chunk(q, k, v * jnp.exp(-reach), chunk.g, None, None, chunk.precision)
    scores, past, h = _decay(without, scores, h * jnp.exp(middle))
    # As in `_decayed_scores`, what a token reads of itself has no decay in it.
    itself = _diagonal(scores)
    others = chunk.dot("bhij,bhjv->bhiv", jnp.where(itself, 0, scores), without.v)
    own = jnp.sum(jnp.where(itself, scores, 0), -1, keepdims=True) * v
    h = _scale_rows(h, after) * jnp.exp(reach[..., -1:, :])
    return (others + past) * jnp.exp(reach) + own, h


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decayed_scores(precision, q, k, reach) -> Array:
    """(q_i e^A_i) . (k_j e^-A_j): equation (5). Its gradient leaves i = j out of the gates.

    There is no decay in what a token reads of itself: its two halves in the gradient cancel, but on
    paper only. Under strong decay their rounding errors would be all that is left.
    """
    return jnp.einsum(
        "bhik,bhjk->bhij", q * jnp.exp(reach), k * jnp.exp(-reach), precision=precision
    )


def _decayed_scores_forward(precision, q, k, reach):
    return _decayed_scores(precision, q, k, reach), (q, k, reach)


def _decayed_scores_backward(precision, residuals, d_scores):
    q, k, reach = residuals
    grow, shrink = jnp.exp(reach), jnp.exp(-reach)
    itself = _diagonal(d_scores)
    d_own = jnp.sum(jnp.where(itself, d_scores, 0), -1, keepdims=True)
    d_others = jnp.where(itself, 0, d_scores)
    d_q = grow * jnp.einsum("bhij,bhjk->bhik", d_others, k * shrink, precision=precision)
    d_k = shrink * jnp.einsum("bhij,bhik->bhjk", d_others, q * grow, precision=precision)
    return d_q + d_own * k, d_k + d_own * q, q * d_q - k * d_k


_decayed_scores.defvjp(_decayed_scores_forward, _decayed_scores_backward)


def _explicit(chunk: Chunk, h: Array) -> tuple[Array, Array]:
    """Every decay by itself, from sums of the gates between two tokens: exact for any gate."""
    q, k, v = chunk.q, chunk.k, chunk.v
    over_key = chunk.gk
    if chunk.g is not None:
        over_key = chunk.g if over_key is None else chunk.g + over_key
    decayed_q, decayed_k = q, k
    pairs = q[..., :, None, :] * k[..., None, :, :]
    if over_key is not None:
        between = _sums_between(over_key)
        from_start = _from_start(between, over_key)
        pairs = pairs * jnp.exp(between)
        decayed_q = q * jnp.exp(from_start)
        decayed_k = k * jnp.exp(_to_end(between))
        h_next = h * _column(jnp.exp(from_start[..., -1:, :]))
    else:
        h_next = h
    scores = jnp.tril(jnp.sum(pairs, -1))[..., None]
    writes = scores * v[..., None, :, :]
    past = chunk.dot("bhik,bhkv->bhiv", decayed_q, h)
    if chunk.gv is not None:
        between = _sums_between(chunk.gv)
        from_start = _from_start(between, chunk.gv)
        writes = writes * jnp.exp(between)
        past = past * jnp.exp(from_start)
        v = v * jnp.exp(_to_end(between))
        h_next = h_next * jnp.exp(from_start[..., -1:, :])
    o = jnp.sum(writes, -2) + past
    return o, h_next + chunk.dot("bhjk,bhjv->bhkv", decayed_k, v)


def _in_small_blocks(chunk: Chunk, h: Array) -> tuple[Array, Array]:
    """Cuts the chunk into blocks, so that only those with extreme gates pay for them."""

    def cut(x: Array) -> Array:
        B, H, C, X = x.shape
        return jnp.moveaxis(x.reshape(B, H, C // _SMALL, _SMALL, X), 2, 0)

    @jax.checkpoint
    def body(h, block):
        o, h = jax.lax.cond(block.is_ordinary(), _factorised, _explicit, block, h)
        return h, o

    h, o = jax.lax.scan(body, h, jax.tree.map(cut, chunk))
    o = jnp.moveaxis(o, 0, 2)
    return o.reshape(*o.shape[:2], -1, o.shape[-1]), h


def _sums_between(g: Float[Array, "*rows chunk x"]) -> Float[Array, "*rows chunk chunk x"]:
    """The sum of `g` after token `j` up to token `i`, at `[i, j]`; zeros where `j >= i`.

    Sums are only ever added. A difference of two cumulative sums would lose digits after a strong
    gate, and everything after `-inf`.
    """
    *rows, C, X = g.shape
    g = jnp.maximum(g, _FORGET)
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


def _reach(g: Float[Array, "*rows chunk x"]) -> tuple[Array, Array]:
    """Cumulative sums as seen from the middle of the chunk, and the sum up to there."""
    C = g.shape[-2]
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((C, C), g.dtype)), (*g.shape[:-2], C, C))
    sums = jnp.einsum("...ij,...jx->...ix", causal, g, precision=jax.lax.Precision.HIGHEST)
    middle = jax.lax.stop_gradient(sums[..., C // 2, :][..., None, :])
    return sums - middle, middle


@jax.custom_vjp
def _scale_rows(x: Float[Array, "*rows n x"], factor: Float[Array, "*rows n 1"]):
    """`x * factor`. A product with ones sums the gradient: XLA is slow at sums of rows on CPUs."""
    return x * factor


def _scale_rows_forward(x, factor):
    return x * factor, (x, factor)


def _scale_rows_backward(residuals, d_y):
    x, factor = residuals
    ones = jnp.ones((x.shape[-1], 1), x.dtype)
    return d_y * factor, jnp.matmul(x * d_y, ones, precision=jax.lax.Precision.HIGHEST)


_scale_rows.defvjp(_scale_rows_forward, _scale_rows_backward)


def _diagonal(x: Float[Array, "*rows chunk chunk"]) -> Bool[Array, "*rows chunk chunk"]:
    i, j = (jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - axis) for axis in (2, 1))
    return i == j


def _column(x: Float[Array, "*rows 1 key"]) -> Float[Array, "*rows key 1"]:
    return x.swapaxes(-1, -2)
