from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float


def wide_dtype(dtype: Any) -> jnp.dtype:
    """The dtype of states, gates and sums: half precision is too narrow for them."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x.astype(wide_dtype(x.dtype))
