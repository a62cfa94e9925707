"""The chunk form in XLA: matrix products inside chunks, a state from one chunk to the next."""

import math
import operator
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .._inputs import count, Inputs
from .._transform import fold_vmap
from .._varlen import Parts, plan_parts, Windows
from ._any_gates import effect_of_any_gates
from ._chunk import Chunks, effect_of_ordinary_gates, Read, sum_until, Write
from ._products import in_registers, Product
from .base import AbstractMethod


# How many chunks are worked on at once: enough to keep a device busy, few enough for the numbers of
# their states to fit into a cache, beside everything else. Gates per channel are more of that.
_MOST_CHUNKS = 8
_MOST_NUMBERS = 2**18
_MOST_NUMBERS_CHANNELS = 2**17
# Tokens of which no pair is worth a factorisation, nor the digits that gradients lose by it.
_FEW = 4


class Chunked(AbstractMethod):
    """Matrix products inside chunks of `block` tokens, a state from each chunk to the next.

    Runs wherever XLA does. The states between chunks are the only ones that are kept for the
    backward pass. Decays of any size are exact: chunks whose per-channel gates are too strong for
    the fast form take a slower one, which is decided at run time. Growth has to stay below $e^{87}$
    from the start of a chunk to its end; a smaller `block` makes that less.

    Has reverse-mode derivatives of every order. For forward mode use [`linrec.Scan`][].

    **Arguments:** `block`, tokens of a chunk, a power of two. Defaults to 64.
    """

    block: int = eqx.field(
        static=True, default=64, converter=partial(count, "`linrec.Chunked(block=...)`")
    )

    def __check_init__(self):
        if self.block & (self.block - 1):
            raise ValueError(
                f"`linrec.Chunked(block=...)` expects a power of two, but got {self.block}."
            )

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        return _run(self.block, inputs.rows, inputs.cu_seqlens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(block, rows, cu_seqlens):
    output, final_state, _ = _fold_vmap(_forward, block, False)(rows, cu_seqlens)
    return output, final_state


def _run_forward(block, rows, cu_seqlens):
    output, final_state, states = _fold_vmap(_forward, block, True)(rows, cu_seqlens)
    return (output, final_state), (rows, states, final_state, cu_seqlens)


def _run_backward(block, residuals, cotangents):
    rows, states, final_state, cu_seqlens = residuals
    rows = (rows, states, final_state, *cotangents)
    return _fold_vmap(_backward, block)(rows, cu_seqlens), None


_run.defvjp(_run_forward, _run_backward)


def _fold_vmap(function, *args):
    """Parts to spare are left out, unless the loop itself is to be differentiated."""
    return fold_vmap(partial(function, *args, False), differentiable=partial(function, *args, True))


def _forward(block: int, keep_states: bool, all_parts: bool, rows: Inputs, cu_seqlens):
    """Walks the parts in order of time; the table holds the state each sequence has reached."""
    walk = _Walk.plan(block, rows, cu_seqlens)
    B, _, H, K, V = rows.initial_state.shape
    kept = (B, len(walk.windows) * walk.chunks, H, K, V)
    states = rows.zeros(kept, rows.state_dtype) if keep_states else None

    def run_part(effect, c, carry):
        output, table, states = carry
        n = walk.parts.sequence[c]
        chunks = walk.prepare(c, *walk.load_part(rows, c))
        o, h, before = _run_chunks(effect, chunks, _at(table, n))
        if keep_states:
            states = _put(states, in_registers(before), c * walk.chunks)
        return walk.store(output, o, c), _put(table, h[:, None], n), states

    output = rows.zeros(rows.output_shape, rows.v.dtype)
    carry = (output, rows.initial_state, states)
    return walk.over_parts(run_part, carry, rows, all_parts)


def _backward(block: int, all_parts: bool, rows, cu_seqlens):
    """Walks the parts back; tables hold the state each sequence has reached, and its gradient."""
    rows, states, final_state, d_output, d_final = rows
    walk = _Walk.plan(block, rows, cu_seqlens)

    def pull_back_part(effect, c, carry):
        d_tokens, d_gamma, d_scale, d_table, table = carry
        n = walk.parts.sequence[c]
        chunks, unprepare = jax.vjp(partial(walk.prepare, c), *walk.load_part(rows, c))
        before = in_registers(
            jax.lax.dynamic_slice_in_dim(states, c * walk.chunks, walk.chunks, axis=1)
        )
        d_o = in_registers(walk.mask(walk.load(d_output, c), c).astype(rows.state_dtype))
        h, d_h = _at((table, d_table), n)
        d_chunks, d_h = _pull_back(effect, chunks, before, h, d_o, d_h)
        from_chunks, d_gamma_n, d_scale_n = unprepare(d_chunks)
        d_tokens = jax.tree.map(lambda all, new: walk.store(all, new, c), d_tokens, from_chunks)
        if d_gamma is not None:
            d_gamma = _put(d_gamma, (_at(d_gamma, n) + d_gamma_n)[:, None], n)
        d_table = _put(d_table, d_h[:, None], n)
        if table is not None:  # parts to spare have kept nothing
            kept = walk.dense | (c < walk.parts.used)
            table = _put(table, jnp.where(kept, before[:, :1], h[:, None]), n)
        return d_tokens, d_gamma, d_scale + d_scale_n, d_table, table

    # Gradients of gates per channel are the only ones to use it.
    table = None if rows.gk is None and rows.gv is None else final_state
    carry = (*rows.zeros_like((rows.tokens, rows.g_gamma, rows.scale)), d_final, table)
    carry = walk.over_parts(pull_back_part, carry, rows, all_parts, backwards=True)
    return rows.gradient(*carry[:-1])


def _run_chunks(effect, chunks: Chunks, h: Array) -> tuple[Array, Array, Array]:
    """The output, the state after the chunks, and the states before each of them."""
    read, write = effect(chunks)
    h, before = _over_chunks(lambda h, write: (write(h), h), h, write)
    return chunks.heads_last(read(before)), h, before


def _pull_back(effect, chunks: Chunks, before: Array, h: Array | None, d_o: Array, d_h: Array):
    """From the states before the chunks and the last one after them.

    What the chunks do by themselves is differentiated last.
    """
    (read, write), pull_back = jax.vjp(effect, chunks)
    d_read, d_before = jax.vjp(Read.__call__, read, before)[1](chunks.heads_first(d_o))
    d_h, d_after = _pull_back_states(write, d_before, d_h)
    after = None if h is None else jnp.concatenate([before[:, 1:], h[:, None]], 1)
    return pull_back((d_read, write.gradient(before, after, d_after)))[0], d_h


def _pull_back_states(write: Write, d_before: Array, d_h: Array) -> tuple[Array, Array]:
    """The gradients of the state before the chunks, and of those after each of them."""
    if write.keeps_everything:
        # A running sum: on CPUs XLA is slower at the chain below. With an axis more, in which there
        # is nothing to sum, it orders the operations around it better (15% of the time, JAX 0.10).
        d_h = d_h[:, None]
        d_states = d_h + sum_until(d_before[:, None], 2, reverse=True)[:, 0]
        return d_states[:, 0], jnp.concatenate([d_states[:, 1:], d_h], 1)

    def one(d_h, chunk):
        write, d_before = chunk
        return write.transposed(d_h) + d_before, d_h

    return _over_chunks(one, d_h, (write, d_before), reverse=True)


def _over_chunks(function, carry, chunks, reverse: bool = False):
    """`jax.lax.scan` over the second axis, unrolled: they are few, and a loop would cost more."""
    n = jax.tree.leaves(chunks)[0].shape[1]
    order = range(n)[::-1] if reverse else range(n)
    out = [None] * n
    for c in order:
        carry, out[c] = function(carry, jax.tree.map(operator.itemgetter((slice(None), c)), chunks))
    return carry, jax.tree.map(lambda *x: jnp.stack(x, 1), *out)


class _Walk(NamedTuple):
    """How to read and write parts of arrays of shape `(B, T, ...)`, in order of time.

    A part is a number of chunks: enough of them to keep a device busy.
    """

    parts: Parts
    chunks: int
    groups: int
    dense: bool
    reverse: bool
    dtype: jnp.dtype
    precision: jax.lax.Precision

    @staticmethod
    def plan(block: int, rows: Inputs, cu_seqlens) -> "_Walk":
        B, T, H, _ = rows.q.shape
        size = min(block, 1 << (T.bit_length() - 1))
        chunks = 1
        if cu_seqlens is None and isinstance(B, int):  # not so in `jax.export` of any batch
            state = math.prod(rows.initial_state.shape)
            channels = (rows.gk is not None) + (rows.gv is not None)
            numbers = _MOST_NUMBERS_CHANNELS if channels else _MOST_NUMBERS
            fit = numbers // state
            if fit == 1 and not channels:
                fit = 2  # pay, even if only one fits
            # Chunks are unrolled. With gates of keys and of values, XLA would be at it for long.
            most = 2 if channels == 2 else _MOST_CHUNKS
            most = min(most, max(1, fit), T // size)
            parts = -(-T // (size * most))
            chunks = min(most, -(-T // (size * parts)))
        return _Walk(
            plan_parts(cu_seqlens, T, size * chunks, rows.reverse),
            chunks,
            H // rows.k.shape[2],
            cu_seqlens is None,
            rows.reverse,
            rows.state_dtype,
            rows.precision,
        )

    @property
    def windows(self) -> Windows:
        return self.parts.windows

    def over_parts(self, function, carry, rows: Inputs, all_parts: bool, backwards: bool = False):
        """`function(effect, c, carry)` for one part `c` after the other, in time or back.

        All of it is inside of a branch: XLA would copy what is loaded before one.
        """
        steps = len(self.windows) if self.dense or all_parts else self.parts.used
        ordinary = partial(function, effect_of_ordinary_gates)
        any_gates = partial(function, effect_of_any_gates)
        if rows.gk is None and rows.gv is None:  # then all gates are ordinary
            run = ordinary
        elif self.windows.size <= _FEW:
            run = any_gates
        else:
            parts = jnp.arange(len(self.windows), dtype=jnp.int32)
            chunks = lambda c: self.prepare(c, *self.load_part(rows, c))
            is_ordinary = jax.lax.map(lambda c: chunks(c).is_ordinary(), parts)
            run = lambda c, carry: jax.lax.cond(is_ordinary[c], ordinary, any_gates, c, carry)
        in_order = lambda i, carry: run(steps - 1 - i if backwards else i, carry)
        return jax.lax.fori_loop(0, steps, in_order, carry)

    def load_part(self, rows: Inputs, c: Int[Array, ""]):
        """What `prepare` takes."""
        g_gamma = _at(rows.g_gamma, self.parts.sequence[c])
        return self.load(rows.tokens, c), g_gamma, rows.scale

    def in_time(self, array: Array) -> Array:
        return jnp.flip(array, axis=1) if self.reverse else array

    def load(self, arrays, c: Int[Array, ""]):
        return jax.tree.map(lambda x: self.in_time(self.windows.load(x, c)), arrays)

    def store(self, array: Array, new: Array, c: Int[Array, ""]) -> Array:
        return self.windows.store(array, self.in_time(new), c)

    def mask(self, x: Array, c: Int[Array, ""]) -> Array:
        """Zeros where a token is not of the part: no key, no value, no decay."""
        if self.windows.whole:
            return x
        valid = self.in_time(self.windows.valid(c, x.ndim))
        return jnp.where(valid, x, jnp.zeros_like(x))

    def prepare(self, c: Int[Array, ""], tokens, g_gamma, scale) -> Chunks:
        """In float32, nothing to mask, one head of everything for each query head."""
        q, k, v, g, gk, gv = tokens
        size = self.windows.size // self.chunks

        def ready(x: Array) -> Array:
            return self.mask(x.astype(self.dtype), c)

        def of_query_heads(x: Array) -> Array:
            return jnp.repeat(x, self.groups, axis=2) if self.groups > 1 else x

        of_tokens = [x for x in (g, gk, gv) if x is not None]
        scalar = None if g is None else g[..., None].astype(self.dtype)
        if g_gamma is not None:
            fixed = g_gamma[:, None, :, None]
            shape = (*q.shape[:3], 1)
            scalar = jnp.broadcast_to(fixed, shape) if scalar is None else scalar + fixed
        if scalar is not None:
            scalar = ready(scalar)
            if self.windows.whole and not of_tokens:  # then all chunks are alike
                scalar = scalar[:, :size]
        # What pays on a CPU: without gates, factors of products are tokens as they lie in memory.
        copied = 0 if gk is None and gv is None and scalar is None else 128
        return Chunks(
            ready(q) * scale[:, None, None, None],
            of_query_heads(in_registers(ready(k))),
            of_query_heads(in_registers(ready(v))),
            scalar,
            None if gk is None else ready(gk),
            None if gv is None else ready(gv),
            size,
            Product(self.precision, copied),
        )


def _at(arrays, index: Int[Array, ""]):
    take = partial(jax.lax.dynamic_index_in_dim, index=index, axis=1, keepdims=False)
    return jax.tree.map(take, arrays)


def _put(array: Array, new: Array, index: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, new, index, axis=1)
