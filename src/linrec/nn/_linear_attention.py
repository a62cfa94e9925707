from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._feature_map import elu_plus_one
from ._layer import AbstractMixer
from ._linear import Init
from ._output import Output
from ._precision import wide
from ._projection import head_size, QueryKeyValue
from ._state import RecurrentState
from ._timeline import AbstractTimeline


FeatureMap = Callable[[Float[Array, " key"]], Float[Array, " feature"]]


class LinearAttention(AbstractMixer):
    r"""Linear attention ([arXiv:2006.16236](https://arxiv.org/abs/2006.16236)).

    $$h_t = h_{t-1} + \phi(k_t) v_t^\top, \quad z_t = z_{t-1} + \phi(k_t), \quad
    y_t = W_o\, \frac{\phi(q_t)^\top h_t}{\phi(q_t)^\top z_t}$$

    The normaliser $z$ is the last value channel of the state: that of a value that is always 1.

    !!! example

        ```python
        import jax
        import linrec

        layer = linrec.nn.LinearAttention(64, feature_map=jax.nn.relu, key=jax.random.key(0))
        y, state = layer(jax.numpy.ones((100, 64)))
        ```
    """

    qkv: QueryKeyValue
    query_map: FeatureMap
    key_map: FeatureMap
    output: Output
    state: RecurrentState
    size: int = eqx.field(static=True)
    normalise: bool = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        key_size: int | None = None,
        value_size: int | None = None,
        *,
        feature_map: FeatureMap = elu_plus_one,
        normalise: bool = True,
        output_norm: bool = False,
        conv_size: int | None = None,
        trainable_state: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `feature_map`: $\phi$, from the channels of one head to its features. One of
            [`linrec.nn.elu_plus_one`][], [`linrec.nn.squared_relu`][], [`linrec.nn.identity`][],
            `jax.nn.relu`, [`linrec.nn.DPFP`][], [`linrec.nn.Hedgehog`][], or any other function.
            If it has parameters, queries and keys each train their own copy.
        - `normalise`: whether to divide by $\phi(q_t)^\top z_t$. The features should then be
            positive.
        - `output_norm`: whether to apply RMS norm to every head's output.
        - The others: as those of [`linrec.nn.GatedLinearAttention`][]; `key_size` defaults to
            `size / num_heads`.
        """
        K = head_size("key_size", key_size, size, num_heads)
        V = head_size("value_size", value_size, size, num_heads)
        qkv_key, output_key = jax.random.split(key)
        self.qkv = QueryKeyValue(
            size, num_heads, num_kv_heads, K, V, conv_size, dtype=dtype, init=init, key=qkv_key
        )
        self.query_map = self.key_map = feature_map
        norm = eqx.nn.RMSNorm(V, use_bias=False, dtype=dtype) if output_norm else None
        self.output = Output(size, num_heads, V, norm=norm, dtype=dtype, init=init, key=output_key)
        (features,) = jax.eval_shape(feature_map, jnp.zeros((K,), self.qkv.dtype)).shape
        self.state = RecurrentState.zeros(
            (num_heads, features, V + normalise), self.qkv.history_shape, self.qkv.dtype
        )
        self.size = size
        self.normalise = normalise
        self.trainable_state = trainable_state

    def run(
        self, x: Float[Array, "seq dim"], state: RecurrentState, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], RecurrentState]:
        q, k, v, conv = self.qkv(x, state.conv, time)
        q, k = jax.vmap(jax.vmap(self.query_map))(q), jax.vmap(jax.vmap(self.key_map))(k)
        if self.normalise:
            if v.dtype == jnp.float16:  # whose range is too narrow for sums over all tokens
                v = wide(v)
            v = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
        o, hidden = time.recurrent(q, k, v, state.hidden, softmax_scale=1.0)
        if self.normalise:
            o = wide(o)
            o = (o[..., :-1] / (o[..., -1:] + 1e-6)).astype(self.qkv.dtype)
        return self.output(o, x), RecurrentState(hidden, conv, time.end(state.position))
