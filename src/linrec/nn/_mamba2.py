import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from .._inputs import count, positive
from ._conv import ShortConvolution
from ._layer import AbstractMixer
from ._linear import apply_linear, Init, make_linear
from ._precision import wide
from ._projection import count_heads
from ._state import RecurrentState
from ._timeline import AbstractTimeline


class Mamba2(AbstractMixer):
    r"""Mamba-2 ([arXiv:2405.21060](https://arxiv.org/abs/2405.21060)).

    One projection gives $z, x, B, C$ and $\Delta$; a short convolution with SiLU runs over
    $x, B, C$. With $\Delta = \operatorname{softplus}(\Delta + b)$ and $A = -e^{A_\text{log}}$, one
    of each for every head:

    $$h_t = e^{\Delta_t A} h_{t-1} + B_t (\Delta_t x_t)^\top, \qquad o_t = C_t^\top h_t + D x_t$$

    $$y_t = W_o \operatorname{RMSNorm}\big(o_t \odot \operatorname{silu}(z_t)\big)$$

    In the words of [`linrec.recurrent`][]: $C$ is the query, $B$ the key, $\Delta x$ the value and
    $\Delta A$ the gate `g`.
    """

    project: eqx.nn.Linear
    conv: ShortConvolution
    dt_bias: Float[Array, " heads"]
    A_log: Float[Array, " heads"]
    D: Float[Array, " heads"]
    norm: eqx.nn.RMSNorm
    output: eqx.nn.Linear
    state: RecurrentState
    size: int = eqx.field(static=True)
    num_heads: int = eqx.field(static=True)
    num_groups: int = eqx.field(static=True)
    key_size: int = eqx.field(static=True)
    value_size: int = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int | None = None,
        num_groups: int = 1,
        key_size: int = 128,
        value_size: int = 64,
        *,
        conv_size: int = 4,
        dt_range: tuple[float, float] = (1e-3, 1e-1),
        trainable_state: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        r"""**Arguments:**

        - `size`: channels of the input and the output.
        - `num_heads`: defaults to `2 * size / value_size`.
        - `num_groups`: how many different $B$ and $C$ there are; divides `num_heads`.
        - `key_size`: channels of $B$ and $C$, the paper's state size.
        - `value_size`: channels of $x$ in one head.
        - `conv_size`: taps of the convolution.
        - `dt_range`: between which $\Delta$ starts out.
        - `trainable_state`, `dtype`, `init`, `key`: as in [`linrec.nn.GatedLinearAttention`][].
        """
        if num_heads is None:
            num_heads = count_heads(2 * size, "value_size", value_size)
        self.num_heads = count("`num_heads`", num_heads)
        self.num_groups = count("`num_groups`", num_groups)
        self.key_size = count("`key_size`", key_size)
        self.value_size = count("`value_size`", value_size)
        if num_heads % num_groups != 0:
            raise ValueError(
                f"`num_groups` ({num_groups}) has to divide `num_heads` ({num_heads}): every B and "
                "C serves the same number of heads."
            )
        self.size = size
        self.trainable_state = trainable_state
        project_key, conv_key, dt_key, A_key, output_key = jax.random.split(key, 5)
        inner = num_heads * value_size
        channels = inner + 2 * num_groups * key_size
        self.project = make_linear(
            size, inner + channels + num_heads, dtype=dtype, init=init, key=project_key
        )
        self.conv = ShortConvolution(channels, conv_size, use_bias=True, dtype=dtype, key=conv_key)
        dtype = self.project.weight.dtype
        low, high = (math.log(positive("`dt_range`", dt)) for dt in dt_range)
        dt = jnp.exp(jax.random.uniform(dt_key, (num_heads,), minval=low, maxval=high))
        self.dt_bias = jnp.log(jnp.expm1(dt)).astype(dtype)  # the inverse of softplus
        A = jax.random.uniform(A_key, (num_heads,), minval=1.0, maxval=16.0)
        self.A_log = jnp.log(A).astype(dtype)
        self.D = jnp.ones((num_heads,), dtype)
        self.norm = eqx.nn.RMSNorm(inner, use_bias=False, dtype=dtype)
        self.output = make_linear(inner, size, dtype=dtype, init=init, key=output_key)
        self.state = RecurrentState.zeros(
            (num_heads, key_size, value_size), self.conv.history_shape, dtype
        )

    def run(
        self, x: Float[Array, "seq dim"], state: RecurrentState, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], RecurrentState]:
        T, H, G, K, V = x.shape[0], self.num_heads, self.num_groups, self.key_size, self.value_size
        inner, groups = H * V, G * K
        z, xBC, dt = jnp.split(
            apply_linear(self.project, x), (inner, 2 * inner + 2 * groups), axis=-1
        )
        xBC, conv = self.conv(xBC, state.conv, time)
        u, B, C = jnp.split(xBC, (inner, inner + groups), axis=-1)
        # Several values share a query and a key here, where `recurrent` has it the other way round.
        B, C = (jnp.repeat(a.reshape(T, G, K), H // G, axis=1) for a in (B, C))
        u = u.reshape(T, H, V)
        dt = jax.nn.softplus(wide(dt) + wide(self.dt_bias)[None])
        g = -dt * jnp.exp(wide(self.A_log))[None]
        v = (wide(u) * dt[..., None]).astype(u.dtype)
        o, hidden = time.recurrent(C, B, v, state.hidden, g=g, softmax_scale=1.0)
        o = (o + self.D[None, :, None] * u).reshape(T, inner)
        y = apply_linear(self.output, jax.vmap(self.norm)(o * jax.nn.silu(z))).astype(x.dtype)
        return y, RecurrentState(hidden, conv, time.end(state.position))
