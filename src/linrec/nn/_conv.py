from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from .._inputs import count
from ._precision import wide
from ._timeline import AbstractTimeline


class ShortConvolution(eqx.Module):
    r"""A causal convolution of each channel with its own few taps, then SiLU.

    $$y_t = \operatorname{silu}\big(b + \sum\nolimits_{i < W} w_i\, x_{t-W+1+i}\big)$$

    Its last `conv_size - 1` inputs are the history that the state keeps.
    """

    weight: Float[Array, "width channels"]
    bias: Float[Array, " channels"] | None

    def __init__(
        self,
        channels: int,
        conv_size: int,
        *,
        use_bias: bool = False,
        dtype: Any = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** `conv_size`, the number of taps, $W$."""
        width = count("`conv_size`", conv_size)
        weight_key, bias_key = jax.random.split(key)
        bound = width**-0.5
        uniform = lambda key, shape: jax.random.uniform(key, shape, dtype, -bound, bound)
        self.weight = uniform(weight_key, (width, channels))
        self.bias = uniform(bias_key, (channels,)) if use_bias else None

    @property
    def history_shape(self) -> tuple[int, int]:
        width, channels = self.weight.shape
        return width - 1, channels

    def __call__(
        self,
        x: Float[Array, "seq channels"],
        history: Float[Array, "*rows history channels"] | None,
        time: AbstractTimeline,
    ) -> tuple[Float[Array, "seq channels"], Float[Array, "*rows history channels"]]:
        M, _ = self.history_shape
        if history is None:
            raise ValueError("`state.conv` lacks the history of the short convolution.")
        extended = time.extend(history.astype(x.dtype), x)
        # A sum of shifted products: XLA fuses it, while its depthwise `conv` (`equinox.nn.Conv1d`)
        # is many times slower on a CPU.
        shifted = (extended[i : extended.shape[0] - M + i] for i in range(M + 1))
        taps = wide(self.weight)
        y = sum(w[None] * wide(rows) for w, rows in zip(taps, shifted, strict=True))
        if self.bias is not None:
            y = y + wide(self.bias)[None]
        y = time.at_tokens(jax.nn.silu(y).astype(x.dtype), M)
        return y, time.last(extended, M)
