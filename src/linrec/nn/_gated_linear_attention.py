from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from .._inputs import count, positive
from ._layer import AbstractMixer
from ._linear import apply_linear, Init, make_linear
from ._output import Output
from ._precision import wide
from ._projection import head_size, QueryKeyValue
from ._state import RecurrentState
from ._timeline import AbstractTimeline


class GatedLinearAttention(AbstractMixer):
    r"""Gated linear attention ([arXiv:2312.06635](https://arxiv.org/abs/2312.06635)).

    Every key channel decays by a gate of its own, made from the input by a low-rank projection:

    $$\alpha_t = \sigma(W_2 W_1 x_t + b)^{1/\tau}, \qquad
    h_t = \operatorname{diag}(\alpha_t) h_{t-1} + k_t v_t^\top$$

    $$y_t = W_o \big(\operatorname{swish}(W_r x_t) \odot
    \operatorname{RMSNorm}(K^{-1/2} q_t^\top h_t)\big)$$

    with the norm of each head apart.

    !!! example

        ```python
        import jax
        import linrec

        layer = linrec.nn.GatedLinearAttention(256, key=jax.random.key(0))
        y, state = layer(jax.numpy.ones((100, 256)))
        ```
    """

    qkv: QueryKeyValue
    gate_down: eqx.nn.Linear
    gate_up: eqx.nn.Linear
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
        gate_rank: int = 16,
        gate_temperature: float = 16.0,
        conv_size: int | None = None,
        trainable_state: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `size`: channels of the input and the output.
        - `num_heads`, `num_kv_heads`: of the queries, and of the keys and values (grouped heads;
            defaults to `num_heads`).
        - `key_size`, `value_size`: channels of one head. Default to `size / num_heads / 2` and
            `size / num_heads`.
        - `gate_rank`: rank of the gate's projection.
        - `gate_temperature`: $\tau$ above. The larger it is, the slower is forgetting.
        - `conv_size`: taps of a short convolution of queries, keys and values. `None`: without.
        - `trainable_state`: whether the state that the layer holds is a parameter.
        - `dtype`: of the parameters.
        - `init`: makes the projections' weights, as `jax.nn.initializers` do. Defaults to that of
            `equinox.nn.Linear`.
        - `key`: for the parameters.
        """
        K = head_size("key_size", key_size, size // 2, num_heads)
        V = head_size("value_size", value_size, size, num_heads)
        qkv_key, down_key, up_key, output_key = jax.random.split(key, 4)
        options = {"dtype": dtype, "init": init}
        self.qkv = QueryKeyValue(
            size, num_heads, num_kv_heads, K, V, conv_size, key=qkv_key, **options
        )
        gate_rank = count("`gate_rank`", gate_rank)
        self.gate_down = make_linear(size, gate_rank, key=down_key, **options)
        self.gate_up = make_linear(gate_rank, num_heads * K, use_bias=True, key=up_key, **options)
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
        logits = apply_linear(self.gate_up, apply_linear(self.gate_down, x)).reshape(q.shape)
        gk = jax.nn.log_sigmoid(wide(logits)) / self.gate_temperature
        o, hidden = time.recurrent(q, k, v, state.hidden, gk=gk)
        return self.output(o, x), RecurrentState(hidden, conv, time.end(state.position))
