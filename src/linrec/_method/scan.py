from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from .._inputs import canonicalise, Inputs
from .._transform import compiled, in_auto_axes
from .._types import AnyArray, FinalState, FixedGate, Scale, State
from .._varlen import sequence_of_token
from ._gates import balanced
from .auto import Auto, by_platform
from .base import AbstractMethod
from .triton import Triton


class Scan(AbstractMethod):
    """The definition: one token after the other.

    A `jax.lax.scan` of [`linrec.step`][]. Slow, and its gradient keeps the state of every token;
    everything else is tested against it. It is the method that has forward-mode derivatives
    (`jax.jvp`, `jax.jacfwd`, `jax.linearize`).
    """

    @property
    def has_forward_mode(self) -> bool:
        return True

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        T = inputs.q.shape[1]
        sequence = sequence_of_token(inputs.cu_seqlens, T)
        xs = (sequence, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs.tokens))
        # One row of the table per sequence; padding, made zeros, writes to a row of its own.
        padding = ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0))
        table = jnp.pad(inputs.initial_state, padding)
        g_gamma = inputs.g_gamma
        if g_gamma is not None:
            g_gamma = jnp.pad(g_gamma, padding[:3])
        N = table.shape[1] - 1

        def body(table, x):
            n, token = x
            token = jax.tree.map(lambda x: jnp.where(n < N, x, jnp.zeros_like(x)), token)
            gamma = None if g_gamma is None else g_gamma[:, n]
            o, h = _step(table[:, n], token, gamma, inputs.scale)
            return table.at[:, n].set(h), o

        table, output = jax.lax.scan(body, table, xs, reverse=inputs.reverse)
        return jnp.moveaxis(output, 0, 1), table[:, :N]


def step(
    state: State,
    query: Float[AnyArray, "*batch heads key"],
    key: Float[AnyArray, "*batch kv_heads key"],
    value: Float[AnyArray, "*batch kv_heads value"],
    g: Float[AnyArray, "*batch heads"] | Float[AnyArray, "*batch heads key"] | None = None,
    g_gamma: FixedGate | None = None,
    gk: Float[AnyArray, "*batch heads key"] | None = None,
    gv: Float[AnyArray, "*batch heads value"] | None = None,
    softmax_scale: Scale | None = None,
) -> tuple[Float[Array, "*batch heads value"], FinalState]:
    r"""One token of the recurrence: what a decoder calls.

    $$h_t = e^{a_t} h_{t-1} e^{c_t} + k_t v_t^\top, \qquad o_t = \text{scale} \cdot q_t^\top h_t$$

    !!! example

        ```python
        import jax.numpy as jnp
        import linrec

        state = jnp.zeros((4, 64, 32))  # heads, key, value
        q = k = jnp.ones((4, 64))
        v = jnp.ones((4, 32))
        o, state = linrec.step(state, q, k, v, g=jnp.full((4,), -0.1))
        ```

    **Arguments:** as those of [`linrec.recurrent`][] without the `seq` axis: `query` is
    `(heads, key)` or `(batch, heads, key)`, and so on. `state` is what `recurrent` or `step`
    returned, or zeros.

    **Returns:** `(output, state)`.
    """
    inputs, layout = canonicalise(
        "linrec.step",
        query,
        key,
        value,
        g,
        g_gamma,
        gk,
        gv,
        softmax_scale,
        state,
        False,
        None,
        state_argument="state",
        one_token=True,
    )

    def specs(batch, _, heads):
        return PartitionSpec(batch, heads) if layout.batched else PartitionSpec(heads)

    return in_auto_axes(partial(_run_token, layout.batched), inputs, specs)


@compiled
def _run_token(batched: bool, inputs: Inputs) -> tuple[Array, Array]:
    elsewhere = partial(_one_token, batched)
    on_gpu = Auto().select(inputs, "gpu")
    if not isinstance(on_gpu, Triton):
        return elsewhere(inputs)
    return by_platform(partial(_decode, on_gpu, batched), elsewhere, inputs)


def _one_token(batched: bool, inputs: Inputs) -> tuple[Array, Array]:
    # Without a batch axis where the caller has none: on a CPU, XLA updates the state in place only
    # if no axis comes and goes on the way. Decoding under `vmap` is several times faster for it.
    at = (slice(None), 0) if batched else (0, 0)
    token = jax.tree.map(lambda x: x[at], inputs.tokens)
    gamma = None if inputs.g_gamma is None else inputs.g_gamma[at]
    return _step(inputs.initial_state[at], token, gamma, inputs.scale[at[:1]])


def _rows_of_one_token(inputs: Inputs) -> tuple[Array, Array]:
    o, h = _one_token(True, inputs)
    return o[:, None], h[:, None]


def _decode(method: Triton, batched: bool, inputs: Inputs) -> tuple[Array, Array]:
    o, h = method.decode(inputs, _rows_of_one_token)
    at = (slice(None), 0) if batched else (0, 0)
    return o[at], h[at]


def _step(h, token, g_gamma, scale):
    """One token of every row: `h` is `(*B, H, K, V)`, `q` is `(*B, H, K)`, `scale` is `(*B,)`."""
    q, k, v, g, gk, gv = token
    wide = lambda x: x.astype(h.dtype)
    # Gates add up before `exp`: their sum may be harmless where one of them is not.
    of_key = [wide(x)[..., None] for x in (g, g_gamma) if x is not None]
    of_key += [] if gk is None else [wide(gk)]
    over_key = sum(of_key[1:], start=of_key[0]) if of_key else None
    over_value = None if gv is None else wide(gv)
    over_key, over_value = balanced(over_key, over_value)
    if over_key is not None:
        h = h * jnp.exp(over_key)[..., None]
    if over_value is not None:
        h = h * jnp.exp(over_value)[..., None, :]
    groups = h.shape[-3] // k.shape[-2]
    k, v_of_head = (jnp.repeat(wide(x), groups, axis=-2) for x in (k, v))
    h = h + k[..., None] * v_of_head[..., None, :]
    # A sum, not a product of a matrix, and one that is multiplied: on a CPU, XLA reads the state
    # with all cores then. The barrier keeps it from leaving out a scale of 1.
    scale = jax.lax.optimization_barrier(scale)[..., None, None]
    return (jnp.sum(wide(q)[..., None] * h, -2) * scale).astype(v.dtype), h
