from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._layer import AbstractMixer
from ._linear import Init
from ._output import Output
from ._precision import wide, wide_dtype
from ._projection import count_heads, head_size, QueryKeyValue
from ._state import RecurrentState
from ._timeline import AbstractTimeline


class HGRN2(AbstractMixer):
    r"""The gated linear RNN with state expansion
    ([arXiv:2404.07904](https://arxiv.org/abs/2404.07904)).

    Keys are tied to the gate: a channel takes in as much as it forgets.

    $$f_t = \lambda + (1 - \lambda)\, \sigma(W_f x_t), \qquad
    h_t = \operatorname{diag}(f_t) h_{t-1} + (1 - f_t) v_t^\top$$

    $$y_t = W_o \operatorname{RMSNorm}(q_t^\top h_t), \qquad q_t = \operatorname{silu}(W_q x_t)$$

    with the norm of all heads together. The lower bound
    $\lambda$ grows with depth, so that later layers remember for longer.
    """

    qkv: QueryKeyValue
    output: Output
    lower_bound: Float[Array, ""]
    """An array, so that layers of any depth stack."""
    fixed: ClassVar[tuple[str, ...]] = ("lower_bound",)
    state: RecurrentState
    size: int = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
        key_size: int = 128,
        value_size: int | None = None,
        *,
        lower_bound: float = 0.0,
        conv_size: int | None = None,
        trainable_state: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `num_heads`: defaults to `size / key_size`.
        - `num_kv_heads`: heads of the gates, which are the keys, and of the values.
        - `key_size`: the paper's expansion ratio.
        - `lower_bound`: $\lambda$. In layer $l$ of $L$ the paper starts from $l / L$.
        - The others: as those of [`linrec.nn.GatedLinearAttention`][].
        """
        if not 0 <= lower_bound < 1:
            raise ValueError(
                "`HGRN2(..., lower_bound=...)` expects a number from 0 up to, and without, 1, but "
                f"got {lower_bound}."
            )
        if num_heads is None:
            num_heads = count_heads(size, "key_size", key_size)
        V = head_size("value_size", value_size, size, num_heads)
        qkv_key, output_key = jax.random.split(key)
        options = {"dtype": dtype, "init": init}
        self.qkv = QueryKeyValue(
            size, num_heads, num_kv_heads, key_size, V, conv_size, key=qkv_key, **options
        )
        self.output = Output(
            size,
            num_heads,
            V,
            norm=eqx.nn.RMSNorm(num_heads * V, use_bias=False, dtype=dtype),
            key=output_key,
            **options,
        )
        self.lower_bound = jnp.asarray(lower_bound, wide_dtype(self.qkv.dtype))
        self.state = self.qkv.zero_state()
        self.size = size
        self.trainable_state = trainable_state

    def run(
        self, x: Float[Array, "seq dim"], state: RecurrentState, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], RecurrentState]:
        q, f, v, conv = self.qkv(x, state.conv, time)
        logits = wide(f)
        bound = jax.lax.stop_gradient(self.lower_bound).astype(logits.dtype)
        # 1 - f, which is exact near 0 in this form.
        k = (1 - bound) * jax.nn.sigmoid(-logits)
        groups = self.qkv.num_heads // self.qkv.num_kv_heads
        gk = jnp.repeat(_log_forget(logits, bound), groups, axis=1)
        o, hidden = time.recurrent(
            jax.nn.silu(q), k.astype(q.dtype), v, state.hidden, gk=gk, softmax_scale=1.0
        )
        return self.output(o, x), RecurrentState(hidden, conv, time.end(state.position))


def _log_forget(
    logits: Float[Array, "seq heads key"], bound: Float[Array, ""]
) -> Float[Array, "seq heads key"]:
    """The logarithm of `f`, in a form that is exact near 1, and in another that is so near 0.

    The form that is not taken gets 0, for its gradient to be finite.
    """
    positive = logits > 0
    high, low = jnp.where(positive, logits, 0), jnp.where(positive, 0, logits)
    near_one = jnp.log1p((bound - 1) * jax.nn.sigmoid(-high))
    near_zero = jnp.logaddexp(jnp.log(bound), jnp.log1p(-bound) + jax.nn.log_sigmoid(low))
    return jnp.where(positive, near_one, near_zero)
