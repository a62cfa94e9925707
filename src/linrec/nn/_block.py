from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ._layer import AbstractLayer, AbstractMixer
from ._linear import apply_linear, Init, make_linear
from ._timeline import AbstractTimeline


class GatedMLP(eqx.Module):
    r"""$W_o \big(\operatorname{swish}(W_g x) \odot W_i x\big)$, known as SwiGLU
    ([arXiv:2002.05202](https://arxiv.org/abs/2002.05202))."""

    gate_and_input: eqx.nn.Linear
    output: eqx.nn.Linear

    def __init__(
        self,
        size: int,
        inner_size: int,
        *,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:** channels of the input and the output, and those in between. The others are
        as in [`linrec.nn.GatedLinearAttention`][]."""
        in_key, out_key = jax.random.split(key)
        self.gate_and_input = make_linear(size, 2 * inner_size, dtype=dtype, init=init, key=in_key)
        self.output = make_linear(inner_size, size, dtype=dtype, init=init, key=out_key)

    def __call__(self, x: Float[Array, "seq dim"]) -> Float[Array, "seq dim"]:
        gate, y = jnp.split(apply_linear(self.gate_and_input, x), 2, axis=-1)
        return apply_linear(self.output, jax.nn.silu(gate) * y).astype(x.dtype)


class Block(AbstractLayer):
    r"""A layer of a model: mixes tokens, then channels, each with a norm and a residual.

    $$u = x + \operatorname{mixer}(\operatorname{RMSNorm}(x)), \qquad
    y = u + \operatorname{MLP}(\operatorname{RMSNorm}(u))$$

    !!! example

        ```python
        import jax
        import linrec

        mixer_key, block_key = jax.random.split(jax.random.key(0))
        mixer = linrec.nn.Retention(64, key=mixer_key)
        block = linrec.nn.Block(mixer, key=block_key)
        y, state = block(jax.numpy.ones((100, 64)))
        ```
    """

    mixer_norm: eqx.nn.RMSNorm
    mixer: AbstractMixer
    mlp_norm: eqx.nn.RMSNorm
    mlp: GatedMLP

    def __init__(
        self,
        mixer: AbstractMixer,
        *,
        mlp_size: int | None = None,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `mixer`: any mixer of `linrec.nn`.
        - `mlp_size`: inner channels of the MLP. Defaults to 8/3 of those of the mixer, rounded up
            to a multiple of 64.
        - `dtype`, `init`, `key`: as in [`linrec.nn.GatedLinearAttention`][], for the MLP; `dtype`
            is that of the norms too.
        """
        if not isinstance(mixer, AbstractMixer):
            raise TypeError(
                f"`Block(mixer)` expects a mixer, an `AbstractMixer`, but got {type(mixer)}."
            )
        if mlp_size is None:
            mlp_size = -(-8 * mixer.size // (3 * 64)) * 64
        norm = lambda: eqx.nn.RMSNorm(mixer.size, use_bias=False, dtype=dtype)
        self.mixer = mixer
        self.mixer_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(mixer.size, mlp_size, dtype=dtype, init=init, key=key)

    @property
    def state(self) -> PyTree:
        return self.mixer.state

    @property
    def token_shape(self) -> tuple[int, ...]:
        return self.mixer.token_shape

    def initial_state(self) -> PyTree:
        return self.mixer.initial_state()

    def run(
        self, x: Float[Array, "seq dim"], state: PyTree, time: AbstractTimeline
    ) -> tuple[Float[Array, "seq dim"], PyTree]:
        y, state = self.mixer.run(jax.vmap(self.mixer_norm)(x), state, time)
        x = x + y
        return x + self.mlp(jax.vmap(self.mlp_norm)(x)), state
