from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from .._inputs import positive
from ._layer import AbstractMixer
from ._linear import apply_linear, Init, make_linear
from ._output import Output
from ._precision import wide
from ._projection import head_size, QueryKeyValue
from ._state import RecurrentState
from ._timeline import AbstractTimeline


class SimpleGatedLinearAttention(AbstractMixer):
    r"""Linear attention with one gate per head and token, as in Mamba-2 and the mLSTM.

    $$\alpha_t = \sigma(W_\alpha x_t + b)^{1/\tau}, \qquad h_t = \alpha_t h_{t-1} + k_t v_t^\top$$

    $$y_t = W_o \big(\operatorname{swish}(W_r x_t) \odot
    \operatorname{RMSNorm}(K^{-1/2} q_t^\top h_t)\big)$$

    Cheaper than [`linrec.nn.GatedLinearAttention`][], whose gates are one per key channel.
    """

    qkv: QueryKeyValue
    gate: eqx.nn.Linear
    output: Output
    state: RecurrentState
    size: int = eqx.field(static=True)
    gate_temperature: float = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        *,
        gate_temperature: float = 16.0,
        conv_size: int | None = None,
        trainable_state: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** as those of [`linrec.nn.GatedLinearAttention`][]."""
        K = head_size("key_size", key_size, size // 2, num_heads)
        V = head_size("value_size", value_size, size, num_heads)
        qkv_key, gate_key, output_key = jax.random.split(key, 3)
        options = {"dtype": dtype, "init": init}
        self.qkv = QueryKeyValue(
            size, num_heads, num_kv_heads, K, V, conv_size, key=qkv_key, **options
        )
        self.gate = make_linear(size, num_heads, use_bias=True, key=gate_key, **options)
        self.output = Output(
            size,
            num_heads,
            V,
            norm=eqx.nn.RMSNorm(V, use_bias=False, dtype=dtype),
            activation=jax.nn.silu,
            key=output_key,
            **options,
        )
        self.state = self.qkv.zero_state()
        self.size = size
        self.gate_temperature = positive("`gate_temperature`", gate_temperature)
        self.trainable_state = trainable_state

    def run(
        self, x: Float[Array, "seq dim"], state: RecurrentState, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], RecurrentState]:
        q, k, v, conv = self.qkv(x, state.conv, time)
        g = jax.nn.log_sigmoid(wide(apply_linear(self.gate, x))) / self.gate_temperature
        o, hidden = time.recurrent(q, k, v, state.hidden, g=g)
        return self.output(o, x), RecurrentState(hidden, conv, time.end(state.position))
