"""What has to be known about log-decays before `exp`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


# Stands for -inf: e^g is 0 all the same, sums and differences of it are not NaN, nor is a product
# of its gradient with 0.
FORGET = -1e30


def balanced(
    key: Float[Array, "*rows key_or_1"] | None, value: Float[Array, "*rows value_or_1"] | None
) -> tuple[Array | None, Array | None]:
    """Gates of key and of value channels that act on the same state, with the same product.

    Where one grows and the other decays, each may overflow while together they cancel. A gate of
    whole states goes with those of channels. Where both are of channels, what is moved from one to
    the other makes the largest of both equal.
    """
    if key is None or value is None:
        return key, value
    if key.shape[-1] == 1:
        return jnp.zeros_like(key), value + key
    if value.shape[-1] == 1:
        return key + value, jnp.zeros_like(value)
    largest = lambda g: jnp.max(g, axis=-1, keepdims=True, initial=FORGET)
    moved = jax.lax.stop_gradient((largest(key) - largest(value)) / 2)
    return key - moved, value + moved
