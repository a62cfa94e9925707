"""Bounded memory: another method on one piece of the sequence axis after the other."""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from .._inputs import count, Inputs, Tokens
from .._varlen import boundaries, Piece, plan_pieces, Windows
from .auto import Auto
from .base import AbstractMethod, expect_method


class Segmented(AbstractMethod):
    """Bounded memory: another method on one piece of the sequence axis after the other.

    A loop over pieces of `chunk_size` tokens that carries the state. What is kept for the backward
    pass is the state before each piece; everything else is computed again, one piece at a time.
    `linrec.recurrent(..., chunk_size=n, method=m)` is
    `linrec.recurrent(..., method=linrec.Segmented(n, m))`.

    Has reverse-mode derivatives of every order. For forward mode use [`linrec.Scan`][].

    **Arguments:**

    - `chunk_size`: tokens of a piece. The last piece may be shorter.
    - `method`: runs the pieces. Defaults to [`linrec.Auto`][].
    """

    chunk_size: int = eqx.field(
        static=True, converter=partial(count, "`linrec.Segmented(chunk_size)`")
    )
    method: AbstractMethod = Auto()

    def __check_init__(self):
        expect_method("linrec.Segmented(chunk_size, method)", self.method)

    def unsupported(self, inputs: Inputs) -> str | None:
        return self.method.unsupported(inputs)

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        if self.chunk_size >= inputs.q.shape[1]:
            return self.method(inputs)
        return _run(self, inputs.rows, inputs.cu_seqlens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(segmented, rows, cu_seqlens):
    return _run_forward(segmented, rows, cu_seqlens)[0]


def _run_forward(segmented, rows, cu_seqlens):
    """Walks the pieces in order of time; the table holds the state each sequence has reached.

    Of the table, one state at most is not the sequence's initial one and still needed: that of the
    sequence which goes on from the piece before. It alone is kept.
    """
    pieces = _Pieces.plan(segmented, rows, cu_seqlens)
    B, _, H, K, V = rows.initial_state.shape

    def body(c, carry):
        output, table, kept = carry
        entering = jnp.sum(jnp.where(pieces.goes_on(c), table, 0), axis=1)
        kept = jax.lax.dynamic_update_index_in_dim(kept, entering, c, axis=1)
        o, table = pieces.run(c, pieces.load(rows, c), rows.g_gamma, rows.scale, table)
        return pieces.windows.store(output, o, c), table, kept

    output = rows.zeros(rows.output_shape, rows.v.dtype)
    kept = rows.zeros((B, len(pieces.windows), H, K, V), rows.state_dtype)
    carry = (output, rows.initial_state, kept)
    output, table, kept = jax.lax.fori_loop(0, len(pieces.windows), body, carry)
    return (output, table), (rows, kept, cu_seqlens)


def _run_backward(segmented, residuals, cotangents):
    """Walks the pieces back; the table holds the gradient of the state each sequence has reached.

    The gradient of a piece is that of its method, from the state the forward pass kept.
    """
    rows, kept, cu_seqlens = residuals
    d_output, d_final = cotangents
    pieces = _Pieces.plan(segmented, rows, cu_seqlens)
    last = len(pieces.windows) - 1

    def body(i, carry):
        d_tokens, d_gamma, d_scale, d_table = carry
        c = last - i
        entering = jax.lax.dynamic_index_in_dim(kept, c, axis=1)
        table = jnp.where(pieces.goes_on(c), entering, rows.initial_state)
        _, pull_back = jax.vjp(
            partial(pieces.run, c), pieces.load(rows, c), rows.g_gamma, rows.scale, table
        )
        new, d_gamma_c, d_scale_c, d_table = pull_back((pieces.windows.load(d_output, c), d_table))
        d_tokens = jax.tree.map(lambda x, y: pieces.windows.store(x, y, c), d_tokens, new)
        d_gamma = None if d_gamma is None else d_gamma + d_gamma_c
        return d_tokens, d_gamma, d_scale + d_scale_c, d_table

    carry = (*rows.zeros_like((rows.tokens, rows.g_gamma, rows.scale)), d_final)
    return rows.gradient(*jax.lax.fori_loop(0, last + 1, body, carry)), None


_run.defvjp(_run_forward, _run_backward)


class _Pieces(NamedTuple):
    method: AbstractMethod
    windows: Windows
    bounds: Int[Array, " boundaries"]
    packed: bool
    reverse: bool

    @staticmethod
    def plan(segmented: Segmented, rows: Inputs, cu_seqlens) -> "_Pieces":
        T = rows.q.shape[1]
        windows = plan_pieces(T, segmented.chunk_size, rows.reverse)
        bounds = boundaries(cu_seqlens, T)
        packed = cu_seqlens is not None or not windows.whole
        return _Pieces(segmented.method, windows, bounds, packed, rows.reverse)

    def piece(self, c: Int[Array, ""]) -> Piece:
        begin, end = self.windows.low[c], self.windows.high[c]
        return Piece(self.bounds, begin, end - begin, self.reverse)

    def goes_on(self, c: Int[Array, ""]) -> Bool[Array, "1 num_seqs 1 1 1"]:
        """Which sequence, one at most, goes on into piece `c` from the piece before."""
        return self.piece(c).comes_in()[None, :, None, None, None]

    def load(self, rows: Inputs, c: Int[Array, ""]) -> Tokens:
        return jax.tree.map(lambda x: self.windows.load(x, c), rows.tokens)

    def run(self, c: Int[Array, ""], tokens: Tokens, g_gamma, scale, table) -> tuple[Array, Array]:
        """Sequences that have no token in the piece are empty in it: their states stay."""
        bounds = self.piece(c).cu_seqlens if self.packed else None
        return self.method(Inputs(*tokens, g_gamma, scale, table, bounds, self.reverse))
