"""Matrix products with gradients in the form that XLA runs fast on a CPU."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Product(NamedTuple):
    """`jnp.einsum` of matrices, such as `"ik,kv->iv"`, with any number of axes before them.

    JAX computes the gradient of the second factor transposed, and turns it round; here the factors
    change places instead.
    """

    precision: jax.lax.Precision
    copied: int
    """Columns up to which a factor that is to be transposed is copied first. The product is faster
    for it; the copy is slow where rows lie far apart."""

    def __call__(self, equation: str, x: Array, y: Array) -> Array:
        return jnp.asarray(_product(self, equation, x, y))

    def factors(self, first: tuple[str, Array], second: tuple[str, Array], axes: str) -> Array:
        """The product of two matrices, given in either order."""
        if axes[0] not in first[0]:
            first, second = second, first
        (x_axes, x), (y_axes, y) = first, second
        if x_axes[1] == axes[0] and x.shape[-1] <= self.copied:
            # Without the barrier XLA takes the transpose into the product again.
            x_axes, x = x_axes[::-1], jax.lax.optimization_barrier(x.swapaxes(-1, -2))
        equation = f"...{x_axes},...{y_axes}->...{axes}"
        return jnp.einsum(equation, x, y, precision=self.precision)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(how: Product, equation: str, x, y):
    x_axes, y_axes, axes = equation.replace("->", ",").split(",")
    return how.factors((x_axes, x), (y_axes, y), axes)


def _product_forward(how, equation, x, y):
    return _product(how, equation, x, y), (x, y)


def _product_backward(how, equation, residuals, d_z):
    x, y = residuals
    x_axes, y_axes, axes = equation.replace("->", ",").split(",")
    d_x = how.factors((axes, d_z), (y_axes, y), x_axes)
    d_y = how.factors((x_axes, x), (axes, d_z), y_axes)
    return d_x, d_y


_product.defvjp(_product_forward, _product_backward)


def in_registers(x: Float[Array, "*rows x"]) -> Float[Array, "*rows x"]:
    """`x`, so that a CPU copies it by whole registers.

    Copies of rows of up to 64 numbers are unrolled by XLA, number by number. It does not unroll
    products, so here is one, with a 1 that it does not know. Longer rows do not suffer from it.
    """
    return x * jax.lax.optimization_barrier(jnp.ones((), x.dtype))


def sum_rows(x: Float[Array, "*rows n x"]) -> Float[Array, "*rows n 1"]:
    """A product with ones: XLA is slow at sums of rows on CPUs."""
    return jnp.matmul(x, jnp.ones((x.shape[-1], 1), x.dtype), precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def scale_rows(x: Float[Array, "*rows n x"], factor: Float[Array, "*rows n 1"]):
    """`x * factor`, with `sum_rows` in its gradient."""
    return x * factor


def _scale_rows_forward(x, factor):
    return x * factor, (x, factor)


def _scale_rows_backward(residuals, d_y):
    x, factor = residuals
    return d_y * factor, sum_rows(x * d_y)


scale_rows.defvjp(_scale_rows_forward, _scale_rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def for_each_chunk(x: Float[Array, "batch 1 *rest"], chunks: int):
    """The same for every chunk. As in `sum_rows`, a product with ones sums the gradient."""
    return jnp.broadcast_to(x, (x.shape[0], chunks, *x.shape[2:]))


def _for_each_chunk_forward(x, chunks):
    return for_each_chunk(x, chunks), None


def _for_each_chunk_backward(chunks, _, d_y):
    ones = jnp.ones((1, chunks), d_y.dtype)
    B, _, *rest = d_y.shape
    d_x = jnp.matmul(ones, d_y.reshape(B, chunks, -1), precision=jax.lax.Precision.HIGHEST)
    return (d_x.reshape(B, 1, *rest),)


for_each_chunk.defvjp(_for_each_chunk_forward, _for_each_chunk_backward)
