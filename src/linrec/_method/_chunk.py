"""What happens inside one chunk. Equation numbers are those of the mathematics page."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


# While the log-decays of a block sum up to less than this, factors e^A and e^-A are exact to
# rounding and far from overflow.
_ORDINARY = 40.0
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


def _by_decay_matrix(chunk: Chunk, h: Array, diagonal: bool = True) -> tuple[Array, Array]:
    """No gate per channel: one decay for each pair of tokens, at any strength."""
    q, k, v = chunk.q, chunk.k, chunk.v
    scores = chunk.dot("bhik,bhjk->bhij", q, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool), 0 if diagonal else -1)
    past = chunk.dot("bhik,bhkv->bhiv", q, h)
    if chunk.g is not None:
        between = _sums_between(chunk.g)
        from_start, to_end = _from_start(between, chunk.g), _to_end(between)
        scores = scores * jnp.exp(between[..., 0])
        past = past * jnp.exp(from_start)
        k = k * jnp.exp(to_end)
        h = h * jnp.exp(from_start[..., -1:, :])
    scores = jnp.where(causal, scores, 0)
    o = chunk.dot("bhij,bhjv->bhiv", scores, v) + past
    return o, h + chunk.dot("bhjk,bhjv->bhkv", k, v)


def _factorised(chunk: Chunk, h: Array) -> tuple[Array, Array]:
    """e^(A_i - A_j) as a product of two factors, then as if there were no gates per channel.

    A token's effect on itself has no decay in it. It is added apart, since in the gates' gradient
    its two halves cancel on paper only.
    """
    q, k, v = chunk.q, chunk.k, chunk.v
    itself = jnp.sum(q * k, -1, keepdims=True) * v
    after = 1.0
    if chunk.gk is not None:
        reach, middle = _reach(chunk.gk)
        q, k = q * jnp.exp(reach), k * jnp.exp(-reach)
        h = h * _column(jnp.exp(middle))
        after = _column(jnp.exp(reach[..., -1:, :]))
    on_output = 1.0
    if chunk.gv is not None:
        reach, middle = _reach(chunk.gv)
        v, on_output = v * jnp.exp(-reach), jnp.exp(reach)
        h = h * jnp.exp(middle)
        after = after * on_output[..., -1:, :]
    without = Chunk(q, k, v, chunk.g, None, None, chunk.precision)
    o, h = _by_decay_matrix(without, h, diagonal=False)
    return o * on_output + itself, h * after


def _explicit(chunk: Chunk, h: Array) -> tuple[Array, Array]:
    """Every decay by itself, from sums of the gates between two tokens: exact for any gate."""
    q, k, v = chunk.q, chunk.k, chunk.v
    over_key = chunk.gk
    if chunk.g is not None:
        over_key = chunk.g if over_key is None else chunk.g + over_key
    causal = jnp.tril(jnp.ones((q.shape[-2],) * 2, bool))[:, :, None]
    decayed_q, decayed_k, out = q, k, 1.0
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
    scores = jnp.sum(pairs, -1, keepdims=True) * causal
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

    Blocks of tokens are merged in pairs, so that sums are only ever added. A difference of two
    cumulative sums would lose digits after a strong gate, and everything after `-inf`.
    """
    *rows, C, X = g.shape
    sums = jnp.zeros((*rows, C, 1, 1, X), g.dtype)
    width = 1
    while width < C:
        before, after = sums[..., 0::2, :, :, :], sums[..., 1::2, :, :, :]
        first = g.reshape(*rows, -1, 2, width, X)[..., 1, 0, :][..., None, None, :]
        across = after[..., :1, :] + first + before[..., -1:, :, :]
        upper = jnp.concatenate([before, jnp.zeros_like(before)], -2)
        lower = jnp.concatenate([across, after], -2)
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
    causal = jnp.tril(jnp.ones((C, C), g.dtype))
    sums = jnp.einsum("ij,bhjk->bhik", causal, g, precision=jax.lax.Precision.HIGHEST)
    middle = jax.lax.stop_gradient(sums[..., C // 2, :][..., None, :])
    return sums - middle, middle


def _column(x: Float[Array, "*rows 1 key"]) -> Float[Array, "*rows key 1"]:
    return x.swapaxes(-1, -2)
