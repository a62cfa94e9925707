"""Feature maps of linear attention: from the channels of one head to its features."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._inputs import count


def identity(x: Float[Array, " key"]) -> Float[Array, " key"]:
    """$x$"""
    return x


def elu_plus_one(x: Float[Array, " key"]) -> Float[Array, " key"]:
    r"""$\operatorname{elu}(x) + 1$ ([arXiv:2006.16236](https://arxiv.org/abs/2006.16236))."""
    return jax.nn.elu(x) + 1


def squared_relu(x: Float[Array, " key"]) -> Float[Array, " key"]:
    r"""$\max(x, 0)^2$"""
    return jnp.square(jax.nn.relu(x))


class DPFP(eqx.Module):
    r"""Deterministic parameter-free projection
    ([arXiv:2102.11174](https://arxiv.org/abs/2102.11174)).

    With $r = [\max(x, 0), \max(-x, 0)]$, the products $r_i\, r_{i - j}$ for $j = 1, \dots,$ `nu`:
    `2 * nu` features for every channel.

    **Arguments:** `nu`, which defaults to 1.
    """

    nu: int = eqx.field(static=True, default=1, converter=partial(count, "`DPFP(nu)`"))

    def __call__(self, x: Float[Array, " key"]) -> Float[Array, " feature"]:
        r = jax.nn.relu(jnp.concatenate([x, -x]))
        return jnp.concatenate([r * jnp.roll(r, j) for j in range(1, self.nu + 1)])


class Hedgehog(eqx.Module):
    r"""A trainable map that can mimic softmax
    ([arXiv:2402.04347](https://arxiv.org/abs/2402.04347)).

    $[\operatorname{softmax}(Wx), \operatorname{softmax}(-Wx)]$, with $W$ the identity at first.
    Twice as many features as channels.

    **Arguments:** `key_size`, the channels of one head.
    """

    weight: Float[Array, "key key"]

    def __init__(self, key_size: int, *, dtype: Any = None):
        self.weight = jnp.eye(count("`Hedgehog(key_size)`", key_size), dtype=dtype)

    def __call__(self, x: Float[Array, " key"]) -> Float[Array, " feature"]:
        projected = self.weight.astype(x.dtype) @ x
        return jnp.concatenate([jax.nn.softmax(projected), jax.nn.softmax(-projected)])
