from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ._inputs import canonicalise, count, Inputs
from ._method.auto import Auto
from ._method.base import AbstractMethod, expect_method
from ._transform import compiled, in_auto_axes, reverse_mode_only
from ._types import (
    CuSeqlens,
    FinalState,
    FixedGate,
    Key,
    KeyGate,
    Output,
    Query,
    ScalarGate,
    Scale,
    State,
    Value,
    ValueGate,
)


def recurrent(
    query: Query,
    key: Key,
    value: Value,
    g: ScalarGate | KeyGate | None = None,
    g_gamma: FixedGate | None = None,
    gk: KeyGate | None = None,
    gv: ValueGate | None = None,
    softmax_scale: Scale | None = None,
    initial_state: State | None = None,
    reverse: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    *,
    chunk_size: int | None = None,
    method: AbstractMethod | None = None,
) -> tuple[Output, FinalState]:
    r"""The gated linear recurrence, also known as (gated) linear attention.

    For every row of the batch and every head, with a state $h$ of shape `(key, value)`:

    $$h_t = \operatorname{diag}(e^{a_t})\, h_{t-1} \operatorname{diag}(e^{c_t}) + k_t v_t^\top,
    \qquad o_t = \text{scale} \cdot q_t^\top h_t$$

    where $a_t$ = `g` + `g_gamma` + `gk` and $c_t$ = `gv` are the logarithms of the decay: equations
    (1) and (2) of the [mathematics](mathematics.md#the-recurrence). Gates may be any float: `-inf`
    forgets the past exactly, positive gates let it grow.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import linrec

        q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1024, 4, 64))
        gates = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(1), k.shape)) / 16
        o, state = linrec.recurrent(q, k, v, gk=gates)  # (2, 1024, 4, 64), (2, 4, 64, 64)
        ```

    **Arguments:**

    - `query`: `(batch, seq, heads, key)`, or `(seq, heads, key)` without a batch; then all other
        arguments lack the batch axis too.
    - `key`: `(batch, seq, kv_heads, key)`. `kv_heads` divides `heads` (grouped heads).
    - `value`: `(batch, seq, kv_heads, value)`.
    - `g`: log-decay per token, `(batch, seq, heads)`, or per token and key channel,
        `(batch, seq, heads, key)`.
    - `g_gamma`: log-decay that is the same for all tokens, `(heads,)` or `(batch, heads)`; with
        `cu_seqlens`, `(heads,)` or `(num_seqs, heads)`.
    - `gk`: log-decay per token and key channel, `(batch, seq, heads, key)`.
    - `gv`: log-decay per token and value channel, `(batch, seq, heads, value)`.
    - `softmax_scale`: what the output is multiplied with. Defaults to `1 / sqrt(key)`.
    - `initial_state`: `(batch, heads, key, value)`; with `cu_seqlens`,
        `(num_seqs, heads, key, value)`. Defaults to zeros.
    - `reverse`: run each sequence from its last token to its first.
    - `cu_seqlens`: `(num_seqs + 1,)` boundaries of sequences that are packed along `seq`, with
        batch 1 or no batch axis. May be traced: one compilation serves every packing of the same
        sizes. Sequences may be empty. Tokens after the last boundary are padding, with output 0.
    - `chunk_size`: bounds the memory of the backward pass: runs, and later differentiates, the
        sequence in pieces of this many tokens. See [`linrec.Segmented`][].
    - `method`: which implementation to run. Defaults to [`linrec.Auto`][].

    **Returns:** `(output, final_state)`. The output has shape `(batch, seq, heads, value)` and the
    value's dtype. The final state has the shape of `initial_state`; it is float32, or float64 if
    `query`, `key` or `value` is.

    **Raises:** `ValueError` or `TypeError` for arguments that do not fit together;
    `NotImplementedError` if `method` cannot run them. Values of `cu_seqlens` are checked when the
    program runs, with `equinox.error_if`.
    """
    return run_recurrence(
        "linrec.recurrent",
        query,
        key,
        value,
        g=g,
        g_gamma=g_gamma,
        gk=gk,
        gv=gv,
        softmax_scale=softmax_scale,
        initial_state=initial_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        method=method,
    )


def recurrent_gla(
    query: Query,
    key: Key,
    value: Value,
    g: ScalarGate | KeyGate | None = None,
    g_gamma: FixedGate | None = None,
    softmax_scale: Scale | None = None,
    initial_state: State | None = None,
    reverse: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    *,
    chunk_size: int | None = None,
    method: AbstractMethod | None = None,
) -> tuple[Output, FinalState]:
    """Gated linear attention ([arXiv:2312.06635](https://arxiv.org/abs/2312.06635)).

    [`linrec.recurrent`][] without `gk` and `gv`: `g` holds the gates, per token
    `(batch, seq, heads)` or per token and key channel `(batch, seq, heads, key)`.

    **Arguments** and **returns:** as [`linrec.recurrent`][].
    """
    return run_recurrence(
        "linrec.recurrent_gla",
        query,
        key,
        value,
        g=g,
        g_gamma=g_gamma,
        softmax_scale=softmax_scale,
        initial_state=initial_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        method=method,
    )


def lightning_attn(
    query: Query,
    key: Key,
    value: Value,
    layer_idx: int,
    num_layers: int,
    softmax_scale: Scale | None = None,
    initial_state: State | None = None,
    reverse: bool = False,
    cu_seqlens: CuSeqlens | None = None,
    *,
    chunk_size: int | None = None,
    method: AbstractMethod | None = None,
) -> tuple[Output, FinalState]:
    """Lightning attention ([arXiv:2401.04658](https://arxiv.org/abs/2401.04658)).

    [`linrec.recurrent`][] with a fixed decay per head, weaker in later layers: head `h` of `H` in
    layer `l` of `L` has `g_gamma[h] = -(8 / H) * (1 - l / L) * h`.

    **Arguments:** `layer_idx` and `num_layers` are `l`, counted from 0, and `L`. The others, and
    what is **returned**, are as in [`linrec.recurrent`][].
    """
    heads = jnp.shape(query)[-2] if jnp.ndim(query) >= 2 else 1
    return run_recurrence(
        "linrec.lightning_attn",
        query,
        key,
        value,
        g_gamma=lightning_decay(heads, layer_idx, num_layers),
        softmax_scale=softmax_scale,
        initial_state=initial_state,
        reverse=reverse,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        method=method,
    )


def lightning_decay(num_heads: int, layer_idx: int, num_layers: int) -> Float[Array, " heads"]:
    """The log-decays of [`linrec.lightning_attn`][].

    **Arguments:** `num_heads` is the number of query heads, `layer_idx` and `num_layers` are as
    there.
    """
    num_heads = count("`num_heads`", num_heads)
    layer_idx = count("`layer_idx`", layer_idx, least=0)
    num_layers = count("`num_layers`", num_layers)
    if layer_idx >= num_layers:
        raise ValueError(
            f"`layer_idx` expects a layer counted from 0, below `num_layers` ({num_layers}), but "
            f"got {layer_idx}."
        )
    # In the digits of Python, of which as many are kept as JAX keeps.
    return jnp.asarray(-(8 / num_heads) * (1 - layer_idx / num_layers) * np.arange(num_heads))


def run_recurrence(
    name: str, *tokens: Any, chunk_size: Any, method: Any, **options: Any
) -> tuple[Array, Array]:
    """What all of these functions do, and the recurrences of layers.

    `name` is what was called, for the errors; the options are those of `canonicalise`.
    """
    method = choose_method(name, method, chunk_size)
    inputs, layout = canonicalise(name, *tokens, **options)
    problem = method.unsupported(inputs)
    if problem is not None:
        raise NotImplementedError(f"`{name}(..., method={method})`: {problem}")
    if not method.has_forward_mode:
        inputs = reverse_mode_only(
            inputs,
            f"`{name}(..., method={method})` has no forward-mode derivatives (`jax.jvp`, "
            "`jax.jacfwd`). `method=linrec.Scan()` has them.",
        )

    def specs(batch, seq, heads):
        return PartitionSpec(batch, seq, heads), PartitionSpec(batch, None, heads)

    return layout.restore(*in_auto_axes(partial(_run, method), inputs, specs))


@compiled
def _run(method: AbstractMethod, inputs: Inputs) -> tuple[Array, Array]:
    if 0 in inputs.q.shape or 0 in inputs.output_shape:
        return inputs.zeros(inputs.output_shape, inputs.v.dtype), inputs.initial_state
    return method(inputs)


def choose_method(name: str, method: Any, chunk_size: Any) -> AbstractMethod:
    """What the arguments of these names ask for. `name` is what the caller called."""
    if method is None:
        method = Auto()
    expect_method(f"{name}(..., method=...)", method)
    if chunk_size is None:
        return method
    return method.in_pieces(count(f"`{name}(..., chunk_size=...)`", chunk_size))
