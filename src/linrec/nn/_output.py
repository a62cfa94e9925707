from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PRNGKeyArray

from ._linear import apply_linear, Init, make_linear


class Output(eqx.Module):
    """From the outputs of the heads back to the model: norm, gate, projection."""

    norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None
    gate: eqx.nn.Linear | None
    linear: eqx.nn.Linear
    activation: Callable[[Array], Array] | None = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        num_heads: int,
        value_size: int,
        *,
        norm: eqx.nn.RMSNorm | eqx.nn.LayerNorm | None = None,
        activation: Callable[[Array], Array] | None = None,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `size`: channels of the model.
        - `num_heads`, `value_size`: of the recurrence.
        - `norm`: of one head's output, or of all heads' together, as its shape says.
        - `activation`: of the gate, which is a projection of the layer's input. `None`: no gate.
        - `dtype`, `init`, `key`: of the projections.
        """
        inner = num_heads * value_size
        gate_key, linear_key = jax.random.split(key)
        self.norm = norm
        self.activation = activation
        self.gate = (
            None
            if activation is None
            else make_linear(size, inner, dtype=dtype, init=init, key=gate_key)
        )
        self.linear = make_linear(inner, size, dtype=dtype, init=init, key=linear_key)

    def __call__(
        self, o: Float[Array, "seq heads value"], x: Float[Array, "seq dim"]
    ) -> Float[Array, "seq dim"]:
        inner = o.reshape(o.shape[0], o.shape[1] * o.shape[2])
        if self.norm is not None:
            groups = o if self.norm.shape == o.shape[2:] else inner[:, None]
            inner = jax.vmap(jax.vmap(self.norm))(groups).reshape(inner.shape)
        if self.gate is not None and self.activation is not None:
            gate = self.activation(apply_linear(self.gate, x))
            inner = inner.astype(gate.dtype) * gate
        return apply_linear(self.linear, inner).astype(x.dtype)
