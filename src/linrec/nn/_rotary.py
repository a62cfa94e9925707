import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ._precision import wide, wide_dtype


def rotate(
    x: Float[Array, "seq heads key"], positions: Int[Array, " seq"], base: float = 10_000.0
) -> Float[Array, "seq heads key"]:
    """Rotary position embedding ([arXiv:2104.09864](https://arxiv.org/abs/2104.09864)).

    Channels `i` and `i + K/2` turn by `position * base ** (-2i / K)`. (`equinox.nn` has the
    embedding for sequences that start at position 0.)
    """
    half = x.shape[-1] // 2
    # Angles are counted in 2**-32 of a turn, where integer overflow is exactly what an angle does
    # at a full turn. In floating point the angle at position 1,000,000 would be off by 0.06.
    turns = base ** (-np.arange(half) / half) / (2 * np.pi)
    turns = jnp.asarray(np.round(turns * 2.0**32).astype(np.uint32))
    angle = positions.astype(jnp.uint32)[:, None] * turns[None]
    angle = (angle.astype(wide_dtype(x.dtype)) * (2 * np.pi * 2.0**-32))[:, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = wide(x[..., :half]), wide(x[..., half:])
    rotated = jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)
    return rotated.astype(x.dtype)
