"""The matrix products of the chunk form with nothing around them: about the least it costs in XLA.

No gates, no mask, and arrays taken as if they lay in memory the way products want them, transposed
or not. So there is no right answer, only a time that an implementation can come near.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._programs import Inputs


CHUNK = 64


def products(inputs: Inputs) -> Array:
    q, k, v = (inputs[name].astype(jnp.float32) for name in ("query", "key", "value"))
    return _products(q, k, v).astype(inputs["value"].dtype)


@jax.custom_vjp
def _products(q: Array, k: Array, v: Array) -> Array:
    return _forward(q, k, v, keep_states=False)[0]


def _forward(q: Array, k: Array, v: Array, keep_states: bool = True):
    parts = _Parts.of(q, v)
    qs, ks, vs = map(parts.cut, (q, k, v))

    def body(c, carry):
        output, h, states = carry
        q, k, v = parts.rows(qs, c), parts.columns(ks, c), parts.rows(vs, c)
        scores = _dot("ik,kj->ij", q, k)
        h, before = _accumulate(h, _dot("kj,jv->kv", k, v))
        o = _dot("ij,jv->iv", scores, v) + _dot("ik,kv->iv", q, before)
        return _put(output, o, c), h, _put(states, before, c) if keep_states else None

    h = jnp.zeros(parts.state, q.dtype)
    states = jnp.zeros((parts.number, parts.chunks * h.size), q.dtype) if keep_states else None
    carry = (jnp.zeros_like(vs), h, states)
    output, _, states = jax.lax.fori_loop(0, parts.number, body, carry)
    return output.reshape(v.shape), (q, k, v, states)


def _backward(residuals, d_output: Array):
    q, k, v, states = residuals
    parts = _Parts.of(q, v)
    qs, ks, vs, d_os = map(parts.cut, (q, k, v, d_output))

    def body(i, carry):
        d_qs, d_ks, d_vs, d_h = carry
        c = parts.number - 1 - i
        q, (k, v, d_o) = parts.columns(qs, c), (parts.rows(x, c) for x in (ks, vs, d_os))
        d_h, after = _accumulate(d_h, _dot("ki,iv->kv", q, d_o))
        scores, d_scores = _dot("jk,ki->ji", k, q), _dot("iv,jv->ij", d_o, v)
        d_q = _dot("ij,jk->ik", d_scores, k) + _dot("iv,kv->ik", d_o, parts.states(states, c))
        d_k = _dot("ki,ij->kj", q, d_scores) + _dot("kv,jv->kj", after, v)
        d_v = _dot("ji,iv->jv", scores, d_o) + _dot("jk,kv->jv", k, after)
        return _put(d_qs, d_q, c), _put(d_ks, d_k, c), _put(d_vs, d_v, c), d_h

    carry = (*map(jnp.zeros_like, (qs, ks, vs)), jnp.zeros(parts.state, q.dtype))
    d_q, d_k, d_v, _ = jax.lax.fori_loop(0, parts.number, body, carry)
    return d_q.reshape(q.shape), d_k.reshape(k.shape), d_v.reshape(v.shape)


_products.defvjp(_forward, _backward)


class _Parts(NamedTuple):
    """Some chunks at once, as many as fit a cache. Arrays are flat but for their number."""

    number: int
    chunks: int
    state: tuple[int, int, int, int]

    @staticmethod
    def of(q: Array, v: Array) -> "_Parts":
        B, T, H, K = q.shape
        state = (B, H, K, v.shape[-1])
        chunks = math.gcd(T // CHUNK, max(1, min(8, 2**17 // math.prod(state))))
        return _Parts(T // CHUNK // chunks, chunks, state)

    def cut(self, x: Array) -> Array:
        return x.reshape(self.number, -1)

    def _at(self, x: Array, c: Array, *shape: int) -> Array:
        B, H, *_ = self.state
        return jax.lax.dynamic_index_in_dim(x, c).reshape(B, self.chunks, H, *shape)

    def rows(self, x: Array, c: Array) -> Array:
        return self._at(x, c, CHUNK, -1)

    def columns(self, x: Array, c: Array) -> Array:
        return self._at(x, c, -1, CHUNK)

    def states(self, x: Array, c: Array) -> Array:
        return self._at(x, c, *self.state[2:])


def _put(x: Array, new: Array, c: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, new.reshape(-1), c, 0)


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
