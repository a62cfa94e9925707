from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._inputs import positive
from ._layer import AbstractMixer
from ._linear import Init
from ._output import Output
from ._projection import head_size, QueryKeyValue
from ._rotary import rotate
from ._state import RecurrentState
from ._timeline import AbstractTimeline


class Retention(AbstractMixer):
    r"""Multi-scale retention, the mixer of RetNet
    ([arXiv:2307.08621](https://arxiv.org/abs/2307.08621)).

    Queries and keys are rotated by their position, which goes on from the state's. Head $i$ decays
    by $\gamma_i = 1 - 2^{-5-i}$ with every token:

    $$h_t = \gamma\, h_{t-1} + k_t v_t^\top, \qquad
    y_t = W_o \big(\operatorname{swish}(W_g x_t) \odot
    \operatorname{GroupNorm}(K^{-1/2} q_t^\top h_t)\big)$$

    where every head is a group.
    """

    qkv: QueryKeyValue
    output: Output
    state: RecurrentState
    size: int = eqx.field(static=True)
    rotary_base: float = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        *,
        rotary_base: float = 10_000.0,
        conv_size: int | None = None,
        trainable_state: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `rotary_base`: channels `i` and `i + key_size / 2` turn by
            `rotary_base ** (-2i / key_size)` with every token.
        - The others: as those of [`linrec.nn.GatedLinearAttention`][]; `key_size` and `value_size`
            default to `size / num_heads` and twice that.
        """
        K = head_size("key_size", key_size, size, num_heads, even=True)
        V = head_size("value_size", value_size, 2 * size, num_heads)
        qkv_key, output_key = jax.random.split(key)
        options = {"dtype": dtype, "init": init}
        self.qkv = QueryKeyValue(
            size, num_heads, num_kv_heads, K, V, conv_size, key=qkv_key, **options
        )
        self.output = Output(
            size,
            num_heads,
            V,
            norm=eqx.nn.LayerNorm(V, use_weight=False, use_bias=False),
            activation=jax.nn.silu,
            key=output_key,
            **options,
        )
        self.state = self.qkv.zero_state()
        self.size = size
        self.rotary_base = positive("`rotary_base`", rotary_base)
        self.trainable_state = trainable_state

    def run(
        self, x: Float[Array, "seq dim"], state: RecurrentState, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], RecurrentState]:
        q, k, v, conv = self.qkv(x, state.conv, time)
        positions = time.positions(state.position)
        q, k = rotate(q, positions, self.rotary_base), rotate(k, positions, self.rotary_base)
        heads = jnp.arange(self.qkv.num_heads, dtype=state.hidden.dtype)
        decay = jnp.log1p(-(2.0 ** (-5 - heads)))
        o, hidden = time.recurrent(q, k, v, state.hidden, g_gamma=decay)
        return self.output(o, x), RecurrentState(hidden, conv, time.end(state.position))
