"""What one writes without linrec: a scan over tokens, and a scan over chunks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._floor import CHUNK
from ._programs import Inputs


def plain_scan(inputs: Inputs) -> Array:
    """A scan over tokens as one writes it with care: batched, one fused update of the state.

    A version for one head under `jax.vmap` is many times slower on a CPU, and no yardstick. Nor is
    this one the fastest everywhere: reading by a sum of products, or unrolling, wins at some
    shapes, and loses by more at others.
    """
    q, k, v = _wide(inputs)
    B, _, H, K = q.shape
    g_gamma = inputs.get("g_gamma")
    gates = tuple(inputs.get(name) for name in ("g", "gk", "gv"))

    def body(h, x):
        q, k, v, g, gk, gv = x
        over_key = [] if g_gamma is None else [g_gamma[None, :, None, None]]
        over_key += [] if g is None else [g[..., None, None]]
        over_key += [] if gk is None else [gk[..., None]]
        if over_key:
            h = h * jnp.exp(sum(over_key[1:], start=over_key[0]))
        if gv is not None:
            h = h * jnp.exp(gv)[..., None, :]
        h = h + k[..., None] * v[..., None, :]
        return h, _dot("bhk,bhkv->bhv", q, h)

    xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, *gates))
    _, o = jax.lax.scan(body, jnp.zeros((B, H, K, v.shape[-1]), q.dtype), xs)
    return jnp.moveaxis(o, 0, 1).astype(inputs["value"].dtype)


def chunk_scan(inputs: Inputs) -> Array:
    """The chunk form in forty lines: a scan over checkpointed chunks, and plain autodiff.

    Gates per channel are factorised around the middle of a chunk, which is fast, and overflows
    where they are strong.
    """
    q, k, v = _wide(inputs)
    B, T, H, K = q.shape
    g_gamma = inputs.get("g_gamma")
    g, gk, gv = (inputs.get(name) for name in ("g", "gk", "gv"))
    causal = jnp.tril(jnp.ones((1, 1, CHUNK, CHUNK), bool))

    def cut(x):
        return x.reshape(B, T // CHUNK, CHUNK, H, -1).transpose(1, 0, 3, 2, 4)

    def around_middle(g):
        """Factors up to each token from the middle, to the middle, and to the end from it."""
        total = jnp.cumsum(g, axis=-2)
        middle = total[..., CHUNK // 2, None, :]
        return jnp.exp(total - middle), jnp.exp(middle - total), jnp.exp(middle)

    @jax.checkpoint
    def body(h, chunk):
        q, k, v, g, gk, gv = chunk
        of_output, of_state = 1.0, 1.0
        if gk is not None:
            up, down, middle = around_middle(gk)
            q, k, h = q * up, k * down, h * middle.swapaxes(-1, -2)
            of_state = up[..., -1:, :].swapaxes(-1, -2)
        if gv is not None:
            of_output, down, middle = around_middle(gv)
            v, h = v * down, h * middle
            of_state = of_state * of_output[..., -1:, :]
        scores = _dot("bhik,bhjk->bhij", q, k)
        if g_gamma is not None:
            fixed = jnp.broadcast_to(g_gamma[None, :, None, None], (1, H, CHUNK, 1))
            g = fixed if g is None else g + fixed
        if g is not None:
            total = jnp.cumsum(g, axis=-2)
            end = total[..., -1:, :]
            between = jnp.where(causal, total - total.swapaxes(-1, -2), -jnp.inf)
            scores, q, past = scores * jnp.exp(between), q * jnp.exp(total), h
            k, h = k * jnp.exp(end - total), h * jnp.exp(end)
        else:
            scores, past = jnp.where(causal, scores, 0), h
        o = _dot("bhij,bhjv->bhiv", scores, v) + _dot("bhik,bhkv->bhiv", q, past)
        return (h + _dot("bhjk,bhjv->bhkv", k, v)) * of_state, o * of_output

    xs = jax.tree.map(cut, (q, k, v, g, gk, gv))
    _, o = jax.lax.scan(body, jnp.zeros((B, H, K, v.shape[-1]), q.dtype), xs)
    value = inputs["value"]
    return o.transpose(1, 0, 3, 2, 4).reshape(value.shape).astype(value.dtype)


def _wide(inputs: Inputs) -> tuple[Array, Array, Array]:
    """The query scaled, the key and the value, all in the state's dtype."""
    q, k, v = (inputs[name].astype(jnp.float32) for name in ("query", "key", "value"))
    return q * q.shape[-1] ** -0.5, k, v


def _dot(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)
