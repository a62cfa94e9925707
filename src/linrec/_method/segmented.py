import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from .._inputs import Inputs
from .auto import Auto
from .base import AbstractMethod


class Segmented(AbstractMethod):
    """Bounded memory: another method on one piece of the sequence axis after the other.

    A checkpointed `jax.lax.scan` over pieces of `chunk_size` tokens that carries the state. What
    is kept for the backward pass is the state before each piece; everything else is computed again,
    one piece at a time. `linrec.recurrent(..., chunk_size=n, method=m)` is
    `linrec.recurrent(..., method=linrec.Segmented(n, m))`.
    """

    chunk_size: int = eqx.field(static=True)
    method: AbstractMethod = Auto()

    def __check_init__(self):
        if not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise ValueError(
                "`chunk_size` expects the number of tokens of a piece, 1 or more, but got "
                f"{self.chunk_size}."
            )

    @property
    def has_forward_mode(self) -> bool:
        return self.method.has_forward_mode

    def unsupported(self, inputs: Inputs) -> str | None:
        return self.method.unsupported(inputs)

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        T, size = inputs.q.shape[1], self.chunk_size
        if size >= T:
            return self.method(inputs)
        pieces = -(-T // size)
        ragged = inputs.cu_seqlens is not None or T % size != 0
        bounds = jnp.array([0, T], jnp.int32) if inputs.cu_seqlens is None else inputs.cu_seqlens
        tokens = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.gk, inputs.gv)

        def cut(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, pieces * size - T), *((0, 0),) * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(x.shape[0], pieces, size, *x.shape[2:]), 1, 0)

        def crosses(boundary):
            """Which sequence, one at most, goes on over the boundary between two pieces."""
            return (bounds[:-1] < boundary) & (boundary < bounds[1:])

        @jax.checkpoint
        def run_piece(h, x):
            """`h` is the state of the sequence that comes in over the boundary."""
            piece, (q, k, v, g, gk, gv) = x
            begin, end = piece * size, (piece + 1) * size
            entry, exit = (end, begin) if inputs.reverse else (begin, end)
            # Sequences that have no token in this piece are empty in it.
            local_bounds = jnp.clip(bounds - begin, 0, size)
            initial_state = jnp.where(
                crosses(entry)[None, :, None, None, None], h[:, None], inputs.initial_state
            )
            output, state = self.method(
                Inputs(
                    q, k, v, g, gk, gv,
                    inputs.g_gamma,
                    inputs.scale,
                    initial_state,
                    local_bounds if ragged else None,
                    inputs.reverse,
                )
            )  # fmt: skip
            return output, state, jnp.diff(local_bounds) > 0, state[:, jnp.argmax(crosses(exit))]

        def body(carry, x):
            h, final_state = carry
            output, state, touched, h = run_piece(h, x)
            return (h, jnp.where(touched[None, :, None, None, None], state, final_state)), output

        carry = (inputs.initial_state[:, 0], inputs.initial_state)
        xs = (jnp.arange(pieces, dtype=jnp.int32), jax.tree.map(cut, tokens))
        (_, final_state), output = jax.lax.scan(body, carry, xs, reverse=inputs.reverse)
        output = jnp.moveaxis(output, 0, 1).reshape(-1, pieces * size, *inputs.output_shape[2:])
        return output[:, :T], final_state
