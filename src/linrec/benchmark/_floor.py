"""The least that the chunk form does: about what it costs in XLA, whoever writes it.

Its matrix products, one pass over each matrix between two of them, and the exponentials of gates per
channel. No sums of gates, no decays of states, no question whether gates are weak enough, and arrays
taken as if they lay in memory the way products want them, transposed or not. So there is no right
answer, only a time that an implementation can come near.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._programs import Inputs


CHUNK = 64


def chunk_floor(inputs: Inputs) -> Array:
    q, k, v = (inputs[name].astype(jnp.float32) for name in ("query", "key", "value"))
    return _run(q, k, v, inputs.get("gk"), inputs.get("gv")).astype(inputs["value"].dtype)


@jax.custom_vjp
def _run(q: Array, k: Array, v: Array, gk: Array | None, gv: Array | None) -> Array:
    return _forward(q, k, v, gk, gv, keep_states=False)[0]


def _forward(q: Array, k: Array, v: Array, gk, gv, keep_states: bool = True):
    parts = _Parts.of(q, v)
    arrays = parts.cut((q, k, v, gk, gv))

    def body(c, carry):
        output, h, states = carry
        qs, ks, vs, gks, gvs = parts.at(arrays, c)
        q, v = parts.rows(_decay(qs, gks)), parts.rows(_grow(vs, gvs))
        k = parts.columns(_grow(ks, gks))
        scores = jnp.tril(_dot("ik,kj->ij", q, k))
        h, before = _accumulate(h, _dot("kj,jv->kv", k, v))
        o = _dot("ij,jv->iv", scores, v) + _dot("ik,kv->iv", q, before)
        output = _put(output, _decay(o.reshape(-1), gvs), c)
        return output, h, _put(states, before, c) if keep_states else None

    h = jnp.zeros(parts.state, q.dtype)
    states = jnp.zeros((parts.number, parts.chunks * h.size), q.dtype) if keep_states else None
    carry = (jnp.zeros_like(arrays[2]), h, states)
    output, _, states = jax.lax.fori_loop(0, parts.number, body, carry)
    return output.reshape(v.shape), (q, k, v, gk, gv, states)


def _backward(residuals, d_output: Array):
    *inputs, states = residuals
    parts = _Parts.of(inputs[0], inputs[2])
    arrays, d_outputs = parts.cut((inputs, d_output))

    def body(i, carry):
        gradients, d_h = carry
        c = parts.number - 1 - i
        (qs, ks, vs, gks, gvs), d_os = parts.at((arrays, d_outputs), c)
        q = parts.columns(_decay(qs, gks))
        k, v, d_o = map(parts.rows, (_grow(ks, gks), _grow(vs, gvs), _decay(d_os, gvs)))
        d_h, after = _accumulate(d_h, _dot("ki,iv->kv", q, d_o))
        scores = jnp.triu(_dot("jk,ki->ji", k, q))
        d_scores = jnp.tril(_dot("iv,jv->ij", d_o, v))
        d_q = _dot("ij,jk->ik", d_scores, k) + _dot("iv,kv->ik", d_o, parts.states(states, c))
        d_k = _dot("ki,ij->kj", q, d_scores) + _dot("kv,jv->kj", after, v)
        d_v = _dot("ji,iv->jv", scores, d_o) + _dot("jk,kv->jv", k, after)
        d_q, d_k, d_v = (x.reshape(-1) for x in (d_q, d_k, d_v))
        d_q, d_k, d_v = _decay(d_q, gks), _grow(d_k, gks), _grow(d_v, gvs)
        d_gk = None if gks is None else qs * d_q - ks * d_k
        d_gv = None if gvs is None else d_os - vs * d_v
        new = (d_q, d_k, d_v, d_gk, d_gv)
        return jax.tree.map(lambda all, x: _put(all, x, c), gradients, new), d_h

    zeros = jax.tree.map(jnp.zeros_like, tuple(arrays))
    carry = (zeros, jnp.zeros(parts.state, d_output.dtype))
    gradients, _ = jax.lax.fori_loop(0, parts.number, body, carry)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), gradients, tuple(inputs))


_run.defvjp(_forward, _backward)


def _decay(x: Array, g: Array | None) -> Array:
    return x if g is None else x * jnp.exp(g)


def _grow(x: Array, g: Array | None) -> Array:
    return x if g is None else x * jnp.exp(-g)


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

    def cut(self, arrays):
        return jax.tree.map(lambda x: x.reshape(self.number, -1), arrays)

    def at(self, arrays, c: Array):
        take = lambda x: jax.lax.dynamic_index_in_dim(x, c, keepdims=False)
        return jax.tree.map(take, arrays)

    def _matrices(self, x: Array, *shape: int) -> Array:
        B, H, *_ = self.state
        return x.reshape(B, self.chunks, H, *shape)

    def rows(self, x: Array) -> Array:
        return self._matrices(x, CHUNK, -1)

    def columns(self, x: Array) -> Array:
        return self._matrices(x, -1, CHUNK)

    def states(self, x: Array, c: Array) -> Array:
        return self._matrices(self.at(x, c), *self.state[2:])


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
