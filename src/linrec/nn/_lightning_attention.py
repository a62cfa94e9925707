from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from .._recurrent import lightning_decay
from ._layer import AbstractMixer
from ._linear import Init
from ._output import Output
from ._precision import wide_dtype
from ._projection import head_size, QueryKeyValue
from ._state import RecurrentState
from ._timeline import AbstractTimeline


class LightningAttention(AbstractMixer):
    r"""Lightning attention ([arXiv:2401.04658](https://arxiv.org/abs/2401.04658)), as in MiniMax-01
    ([arXiv:2501.08313](https://arxiv.org/abs/2501.08313)).

    Every head decays at a fixed rate, slower in later layers. With SiLU on queries, keys and
    values:

    $$h_t = e^{-s} h_{t-1} + k_t v_t^\top, \qquad
    y_t = W_o \big(\sigma(W_g x_t) \odot \operatorname{RMSNorm}(q_t^\top h_t)\big)$$

    with the norm of all heads together. The slopes $s$ are, for head $h$ of $H$ in layer $l$ of
    $L$, one of

    - `"linear"`: $\frac{8}{H} (1 - \frac{l}{L})\, h$, as in [`linrec.lightning_attn`][];
    - `"geometric"`: $2^{-8 (h + 1) / H} (1 - \frac{l}{L - 1} + 10^{-5})$, as in MiniMax's released
        models (the slopes of ALiBi; for an $H$ that is no power of two, ALiBi's rule for it).
    """

    qkv: QueryKeyValue
    output: Output
    decay: Float[Array, " heads"]
    """The logarithm of the decay. An array, so that layers of any depth stack."""
    fixed: ClassVar[tuple[str, ...]] = ("decay",)
    state: RecurrentState
    size: int = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int = 8,
        num_kv_heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        *,
        layer_idx: int,
        num_layers: int,
        slopes: Literal["linear", "geometric"] = "linear",
        conv_size: int | None = None,
        trainable_state: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `layer_idx`, `num_layers`: the layer's place in the model, counted from 0, and the number
            of layers.
        - `slopes`: `"linear"` or `"geometric"`, see above.
        - The others: as those of [`linrec.nn.GatedLinearAttention`][]; `key_size` defaults to
            `size / num_heads`.
        """
        if slopes not in ("linear", "geometric"):
            raise ValueError(
                "`LightningAttention(..., slopes=...)` expects 'linear' or 'geometric', but got "
                f"{slopes!r}."
            )
        K = head_size("key_size", key_size, size, num_heads)
        V = head_size("value_size", value_size, size, num_heads)
        qkv_key, output_key = jax.random.split(key)
        options = {"dtype": dtype, "init": init}
        self.qkv = QueryKeyValue(
            size, num_heads, num_kv_heads, K, V, conv_size, key=qkv_key, **options
        )
        self.output = Output(
            size,
            num_heads,
            V,
            norm=eqx.nn.RMSNorm(num_heads * V, use_bias=False, dtype=dtype),
            activation=jax.nn.sigmoid,
            key=output_key,
            **options,
        )
        decay = lightning_decay(num_heads, layer_idx, num_layers)
        if slopes == "geometric":
            decay = -(1 - layer_idx / max(num_layers - 1, 1) + 1e-5) * _alibi_slopes(num_heads)
        self.decay = jnp.asarray(decay, wide_dtype(self.qkv.dtype))
        self.state = self.qkv.zero_state()
        self.size = size
        self.trainable_state = trainable_state

    def run(
        self, x: Float[Array, "seq dim"], state: RecurrentState, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], RecurrentState]:
        q, k, v, conv = self.qkv(x, state.conv, time)
        q, k, v = (jax.nn.silu(a) for a in (q, k, v))
        decay = jax.lax.stop_gradient(self.decay)
        o, hidden = time.recurrent(q, k, v, state.hidden, g_gamma=decay, softmax_scale=1.0)
        return self.output(o, x), RecurrentState(hidden, conv, time.end(state.position))


def _alibi_slopes(heads: int) -> np.ndarray:
    power = 1 << (heads.bit_length() - 1)  # the largest power of two that is not above `heads`
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    between = 2.0 ** (-4 / power * np.arange(1, 2 * power + 1, 2))
    return np.concatenate([slopes, between[: heads - power]])
