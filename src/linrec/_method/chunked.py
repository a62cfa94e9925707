"""The chunk form in XLA: matrix products inside chunks, a state from one chunk to the next."""

import dataclasses
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._inputs import Inputs
from .._transform import fold_vmap
from .._varlen import Chunks, plan_chunks, Windows
from ._chunk import Chunk, chunk_forms
from .base import AbstractMethod


class Chunked(AbstractMethod):
    """Matrix products inside chunks of `block` tokens, a state from each chunk to the next.

    Runs wherever XLA does. The states between chunks are the only ones that are kept for the
    backward pass. Gates of any size are exact: chunks whose per-channel gates are too strong for
    the fast form take a slower one, which is decided at run time.

    Has reverse-mode derivatives of every order. For forward mode use [`linrec.Scan`][].
    """

    block: int = eqx.field(static=True, default=64)

    def __check_init__(self):
        if not isinstance(self.block, int) or self.block < 1 or self.block & (self.block - 1):
            raise ValueError(
                f"`linrec.Chunked(block=...)` expects a power of two, but got {self.block}."
            )

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        if 0 in inputs.q.shape or 0 in inputs.output_shape:
            return inputs.zeros(inputs.output_shape, inputs.v.dtype), inputs.initial_state
        rows = dataclasses.replace(inputs, cu_seqlens=None)
        return _run(self.block, rows, inputs.cu_seqlens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(block, rows, cu_seqlens):
    output, final_state, _ = _fold_vmap(_forward, block, False)(rows, cu_seqlens)
    return output, final_state


def _run_forward(block, rows, cu_seqlens):
    output, final_state, states = _fold_vmap(_forward, block, True)(rows, cu_seqlens)
    return (output, final_state), (rows, states, cu_seqlens)


def _run_backward(block, residuals, cotangents):
    rows, states, cu_seqlens = residuals
    return _fold_vmap(_backward, block)((rows, states, *cotangents), cu_seqlens), None


_run.defvjp(_run_forward, _run_backward)


def _fold_vmap(function, *args):
    """Chunks to spare are left out, unless the loop itself is to be differentiated."""
    return fold_vmap(partial(function, *args, False), differentiable=partial(function, *args, True))


def _forward(block: int, keep_states: bool, all_chunks: bool, rows: Inputs, cu_seqlens):
    """Walks the chunks in order of time; the table holds the state each sequence has reached."""
    walk = _Walk.plan(block, rows, cu_seqlens)
    B, _, H, K, V = rows.initial_state.shape
    states = rows.zeros((B, len(walk.windows), H, K, V), rows.state_dtype) if keep_states else None

    def body(c, carry):
        output, table, states = carry
        n = walk.chunks.sequence[c]
        chunk = walk.prepare(c, walk.load(rows.tokens, c), _at(rows.g_gamma, n), rows.scale)
        h = _at(table, n)
        if keep_states:
            states = _put(states, h, c)
        o, h = jax.lax.switch(chunk.form(), walk.forms, chunk, h)
        return walk.store(output, o.swapaxes(1, 2), c), _put(table, h, n), states

    output = rows.zeros(rows.output_shape, rows.v.dtype)
    carry = (output, rows.initial_state, states)
    return jax.lax.fori_loop(0, walk.steps(all_chunks), body, carry)


def _backward(block: int, all_chunks: bool, rows, cu_seqlens):
    """Walks the chunks back; the table holds the gradient of the state each sequence has reached.

    The gradient of a chunk is that of its form, from the state the forward pass kept.
    """
    rows, states, d_output, d_final = rows
    walk = _Walk.plan(block, rows, cu_seqlens)
    pull_backs = [partial(_pull_back, form) for form in walk.forms]
    steps = walk.steps(all_chunks)

    def body(i, carry):
        d_tokens, d_gamma, d_scale, d_table = carry
        c = steps - 1 - i
        n = walk.chunks.sequence[c]
        chunk, unprepare = jax.vjp(
            partial(walk.prepare, c),
            walk.load(rows.tokens, c),
            _at(rows.g_gamma, n),
            rows.scale,
        )
        d_o = walk.mask(walk.load(d_output, c), c).swapaxes(1, 2).astype(rows.state_dtype)
        cotangents = (d_o, _at(d_table, n))
        d_chunk, d_h = jax.lax.switch(chunk.form(), pull_backs, chunk, _at(states, c), cotangents)
        from_chunk, d_gamma_n, d_scale_n = unprepare(d_chunk)
        d_tokens = jax.tree.map(lambda all, new: walk.store(all, new, c), d_tokens, from_chunk)
        if d_gamma is not None:
            d_gamma = _put(d_gamma, _at(d_gamma, n) + d_gamma_n, n)
        return d_tokens, d_gamma, d_scale + d_scale_n, _put(d_table, d_h, n)

    zeros_like = partial(jax.tree.map, lambda x: rows.zeros(x.shape, x.dtype))
    carry = (*zeros_like((rows.tokens, rows.g_gamma, rows.scale)), d_final)
    return rows.gradient(*jax.lax.fori_loop(0, steps, body, carry))


def _pull_back(form, chunk, h, cotangents):
    return jax.vjp(form, chunk, h)[1](cotangents)


class _Walk(NamedTuple):
    """How to read and write chunks of arrays of shape `(B, T, ...)`, in order of time."""

    chunks: Chunks
    groups: int
    dense: bool
    reverse: bool
    dtype: jnp.dtype
    precision: jax.lax.Precision
    forms: list

    @staticmethod
    def plan(block: int, rows: Inputs, cu_seqlens) -> "_Walk":
        T = rows.q.shape[1]
        size = min(block, 1 << (T.bit_length() - 1))
        return _Walk(
            plan_chunks(cu_seqlens, T, size, rows.reverse),
            rows.q.shape[2] // rows.k.shape[2],
            cu_seqlens is None,
            rows.reverse,
            rows.state_dtype,
            rows.precision,
            chunk_forms(size, rows.gk is not None or rows.gv is not None),
        )

    @property
    def windows(self) -> Windows:
        return self.chunks.windows

    def steps(self, all_chunks: bool) -> int | Int[Array, ""]:
        return len(self.windows) if self.dense or all_chunks else self.chunks.used

    def in_time(self, array: Array) -> Array:
        return jnp.flip(array, axis=1) if self.reverse else array

    def load(self, arrays, c: Int[Array, ""]):
        return jax.tree.map(lambda x: self.in_time(self.windows.load(x, c)), arrays)

    def store(self, array: Array, new: Array, c: Int[Array, ""]) -> Array:
        return self.windows.store(array, self.in_time(new), c)

    def mask(self, x: Array, c: Int[Array, ""]) -> Array:
        """Zeros where a token is not of the chunk: no key, no value, no decay."""
        if self.windows.whole:
            return x
        valid = self.in_time(self.windows.valid(c, x.ndim))
        return jnp.where(valid, x, jnp.zeros_like(x))

    def prepare(self, c: Int[Array, ""], tokens, g_gamma, scale) -> Chunk:
        """Heads first, float32, nothing to mask, one head of everything for each query head."""
        q, k, v, g, gk, gv = tokens

        def heads_first(x: Array) -> Array:
            return self.mask(x.astype(self.dtype), c).swapaxes(1, 2)

        def of_query_heads(x: Array) -> Array:
            return jnp.repeat(x, self.groups, axis=1) if self.groups > 1 else x

        scalar = None
        if g is not None:
            scalar = g[..., None].astype(self.dtype)
        if g_gamma is not None:
            fixed = g_gamma[:, None, :, None]
            shape = (*q.shape[:3], 1)
            scalar = jnp.broadcast_to(fixed, shape) if scalar is None else scalar + fixed
        return Chunk(
            heads_first(q) * scale[:, None, None, None],
            of_query_heads(heads_first(k)),
            of_query_heads(heads_first(v)),
            None if scalar is None else heads_first(scalar),
            None if gk is None else heads_first(gk),
            None if gv is None else heads_first(gv),
            self.precision,
        )


def _at(arrays, index: Int[Array, ""]):
    take = partial(jax.lax.dynamic_index_in_dim, index=index, axis=1, keepdims=False)
    return jax.tree.map(take, arrays)


def _put(array: Array, new: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_index_in_dim(array, new, index, axis=1)
