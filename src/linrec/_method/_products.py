"""Matrix products with gradients in the form that XLA runs fast on a CPU."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def product(equation: str, precision: jax.lax.Precision, x: Array, y: Array) -> Array:
    """`jnp.einsum` of matrices, such as `"ik,kv->iv"`, with any number of axes before them.

    JAX's own gradients of it come out transposed where rows and columns of the result are those of
    the second and the first factor; here the factors change places.
    """
    return jnp.asarray(_product(equation, precision, x, y))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(equation, precision, x, y):
    x_axes, y_axes, axes = equation.replace("->", ",").split(",")
    return _einsum(precision, (x_axes, x), (y_axes, y), axes)


def _product_forward(equation, precision, x, y):
    return _product(equation, precision, x, y), (x, y)


def _product_backward(equation, precision, residuals, d_z):
    x, y = residuals
    x_axes, y_axes, axes = equation.replace("->", ",").split(",")
    d_x = _einsum(precision, (axes, d_z), (y_axes, y), x_axes)
    d_y = _einsum(precision, (x_axes, x), (axes, d_z), y_axes)
    return d_x, d_y


_product.defvjp(_product_forward, _product_backward)


def _einsum(precision, first: tuple[str, Array], second: tuple[str, Array], axes: str) -> Array:
    if axes[0] not in first[0]:
        first, second = second, first
    equation = f"...{first[0]},...{second[0]}->...{axes}"
    return jnp.einsum(equation, first[1], second[1], precision=precision)


@jax.custom_vjp
def scale_rows(x: Float[Array, "*rows n x"], factor: Float[Array, "*rows n 1"]):
    """`x * factor`. A product with ones sums the gradient: XLA is slow at sums of rows on CPUs."""
    return x * factor


def _scale_rows_forward(x, factor):
    return x * factor, (x, factor)


def _scale_rows_backward(residuals, d_y):
    x, factor = residuals
    ones = jnp.ones((x.shape[-1], 1), x.dtype)
    return d_y * factor, jnp.matmul(x * d_y, ones, precision=jax.lax.Precision.HIGHEST)


scale_rows.defvjp(_scale_rows_forward, _scale_rows_backward)
