from collections.abc import Callable
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray


Init = Callable[[PRNGKeyArray, tuple[int, ...], Any], Array]
"""Makes a weight of shape `(in, out)`: anything of `jax.nn.initializers`."""


def make_linear(
    in_size: int,
    out_size: int,
    *,
    use_bias: bool = False,
    dtype: Any = None,
    init: Init | None = None,
    key: PRNGKeyArray,
) -> eqx.nn.Linear:
    """An `equinox.nn.Linear` whose weight comes from `init`, if given."""
    linear = eqx.nn.Linear(in_size, out_size, use_bias=use_bias, dtype=dtype, key=key)
    if init is None:
        return linear
    weight = init(key, (in_size, out_size), linear.weight.dtype).T
    return eqx.tree_at(lambda linear: linear.weight, linear, weight)


def apply_linear(linear: eqx.nn.Linear, x: Float[Array, "seq in"]) -> Float[Array, "seq out"]:
    """Computes in the parameters' dtype.

    As one product with the rows of `x` in front. `vmap(linear)`, being `weight @ x`, has them
    behind, and every reader of the result then reads it across.
    """
    y = x.astype(linear.weight.dtype) @ linear.weight.T
    return y if linear.bias is None else y + linear.bias[None]
