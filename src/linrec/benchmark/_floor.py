"""The least that the chunk form does: about what it costs in XLA, whoever writes it.

Arrays are brought from the way users pass them to matrices of one head, and back; the products of
these; one pass over each matrix between two products; the sums of gates per channel, and their
exponentials. No decays of states, no question whether gates are weak enough. So there is no right
answer, only a time that an implementation can come near.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._method._chunk import cumulative
from ._programs import Inputs


CHUNK = 64


def chunk_floor(inputs: Inputs) -> Array:
    q, k, v = (inputs[name].astype(jnp.float32) for name in ("query", "key", "value"))
    return _run(q, k, v, inputs.get("gk"), inputs.get("gv")).astype(inputs["value"].dtype)


@jax.custom_vjp
def _run(q: Array, k: Array, v: Array, gk: Array | None, gv: Array | None) -> Array:
    return _forward(q, k, v, gk, gv, keep_states=False)[0]


def _forward(q: Array, k: Array, v: Array, gk, gv, keep_states: bool = True):
    arrays = (q, k, v, gk, gv)
    parts = _Parts.of(q, v)

    def body(c, carry):
        output, h, states = carry
        q, k, v, gk, gv = parts.load(arrays, c)
        gk, gv = _sums(gk), _sums(gv)
        q, k, v = _decay(q, gk), _columns(_grow(k, gk)), _grow(v, gv)
        scores = jnp.tril(_dot("ik,kj->ij", q, k))
        h, before = _accumulate(h, _dot("kj,jv->kv", k, v))
        o = _dot("ij,jv->iv", scores, v) + _dot("ik,kv->iv", q, before)
        output = parts.store(output, _decay(o, gv), c)
        return output, h, parts.keep(states, before, c) if keep_states else None

    h = jnp.zeros(parts.state, q.dtype)
    states = jnp.zeros((parts.number, parts.chunks, *h.shape), q.dtype) if keep_states else None
    output, _, states = jax.lax.fori_loop(0, parts.number, body, (jnp.zeros_like(v), h, states))
    return output, (arrays, states)


def _backward(residuals, d_output: Array):
    arrays, states = residuals
    parts = _Parts.of(arrays[0], arrays[2])

    def body(i, carry):
        gradients, d_h = carry
        c = parts.number - 1 - i
        (raw_q, raw_k, raw_v, gk, gv), raw_d_o = parts.load((arrays, d_output), c)
        gk, gv = _sums(gk), _sums(gv)
        q, k, v, d_o = _decay(raw_q, gk), _grow(raw_k, gk), _grow(raw_v, gv), _decay(raw_d_o, gv)
        columns = _columns(q)
        d_h, after = _accumulate(d_h, _dot("ki,iv->kv", columns, d_o))
        scores = jnp.triu(_dot("jk,ki->ji", k, columns))
        d_scores = jnp.tril(_dot("iv,jv->ij", d_o, v))
        d_q = _dot("ij,jk->ik", d_scores, k) + _dot("iv,kv->ik", d_o, parts.kept(states, c))
        d_k = _dot("ki,ij->kj", columns, d_scores) + _dot("kv,jv->kj", after, v)
        d_v = _dot("ji,iv->jv", scores, d_o) + _dot("jk,kv->jv", k, after)
        d_q, d_k, d_v = _decay(d_q, gk), _grow(_columns(d_k), gk), _grow(d_v, gv)
        d_gk = None if gk is None else _sums(raw_q * d_q - raw_k * d_k, reverse=True)
        d_gv = None if gv is None else _sums(raw_d_o - raw_v * d_v, reverse=True)
        new = (d_q, d_k, d_v, d_gk, d_gv)
        return jax.tree.map(lambda all, x: parts.store(all, x, c), gradients, new), d_h

    carry = (jax.tree.map(jnp.zeros_like, arrays), jnp.zeros(parts.state, d_output.dtype))
    return jax.lax.fori_loop(0, parts.number, body, carry)[0]


_run.defvjp(_forward, _backward)


def _sums(g: Array | None, reverse: bool = False) -> Array | None:
    return None if g is None else jnp.asarray(cumulative(g.swapaxes(2, 3), reverse)).swapaxes(2, 3)


def _decay(x: Array, g: Array | None) -> Array:
    return x if g is None else x * jnp.exp(g)


def _grow(x: Array, g: Array | None) -> Array:
    return x if g is None else x * jnp.exp(-g)


def _columns(x: Array) -> Array:
    """A copy: products with it are faster than if XLA took the transpose into them."""
    return jax.lax.optimization_barrier(x.swapaxes(-1, -2))


class _Parts(NamedTuple):
    """Some chunks at once, as many as fit a cache."""

    number: int
    chunks: int
    state: tuple[int, int, int, int]

    @staticmethod
    def of(q: Array, v: Array) -> "_Parts":
        B, T, H, K = q.shape
        state = (B, H, K, v.shape[-1])
        chunks = math.gcd(T // CHUNK, max(1, min(8, 2**17 // math.prod(state))))
        return _Parts(T // CHUNK // chunks, chunks, state)

    def load(self, arrays, c: Array):
        """Heads first."""
        size = self.chunks * CHUNK

        def one(x):
            x = jax.lax.dynamic_slice_in_dim(x, c * size, size, axis=1)
            B, _, H, X = x.shape
            return x.reshape(B, self.chunks, CHUNK, H, X).swapaxes(2, 3)

        return jax.tree.map(one, arrays)

    def store(self, array: Array, new: Array, c: Array) -> Array:
        size = self.chunks * CHUNK
        B, _, H, X = array.shape
        new = new.swapaxes(2, 3).reshape(B, size, H, X)
        return jax.lax.dynamic_update_slice_in_dim(array, new, c * size, axis=1)

    def keep(self, states: Array, before: Array, c: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(states, before.swapaxes(0, 1), c, 0)

    def kept(self, states: Array, c: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(states, c, keepdims=False).swapaxes(0, 1)


def _accumulate(h: Array, written: Array) -> tuple[Array, Array]:
    """The state after all chunks, and those before each of them."""
    before = []
    for c in range(written.shape[1]):
        before.append(h)
        h = h + written[:, c]
    return h, jnp.stack(before, 1)


def _dot(equation: str, x: Array, y: Array) -> Array:
    equation = "..." + equation.replace(",", ",...").replace("->", "->...")
    return jnp.einsum(equation, x, y, precision=jax.lax.Precision.HIGHEST)
