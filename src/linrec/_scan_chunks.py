import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from ._inputs import count


def scan_chunks(
    function: Callable[[Any, Any], tuple[Any, Any]],
    xs: PyTree[Array],
    state: PyTree[Array],
    chunk_size: int,
    *,
    two_level: bool = False,
    truncate: bool = False,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """Runs, and later differentiates, a whole model over a sequence of any length, in pieces.

    A checkpointed `jax.lax.scan` over chunks of tokens that carries the state. What is kept for
    the backward pass is the state before each chunk; everything else is computed again, one chunk
    at a time. Values and gradients are those of `function(xs, state)`.

    !!! example

        ```python
        import equinox as eqx
        import jax
        import linrec

        make_mixer = lambda layer_idx, key: linrec.nn.Retention(64, key=key)
        model = linrec.nn.LanguageModel(make_mixer, 2, vocab_size=256, key=jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (10_001,), 0, 256)

        @eqx.filter_value_and_grad
        def loss(model):
            total, _ = linrec.scan_chunks(
                lambda chunk, state: model.loss(*chunk, state),
                (tokens[:-1], tokens[1:]),
                model.initial_state(),
                chunk_size=1000,
            )
            return total / 10_000
        ```

    **Arguments:**

    - `function`: takes `(xs, state)` to `(ys, state)`: a layer, a model, or a loss.
    - `xs`: arrays with the sequence axis first.
    - `state`: the state to start from, for example `model.initial_state()`.
    - `chunk_size`: tokens of a chunk. The last chunk may be shorter.
    - `two_level`: keep the state before every group of chunks only, and within one group at a time
        before each chunk: about `2 * sqrt(n)` states instead of `n`, for one more forward pass.
    - `truncate`: truncated backpropagation: no gradient crosses from a chunk to the one before.

    **Returns:** `(ys, state)`. Scalars among `ys` are added up over the chunks, as fits losses;
    arrays are joined along their first axis.
    """
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(xs)}
    if len(lengths) != 1 or lengths == {()}:
        raise ValueError(
            "`linrec.scan_chunks(function, xs, ...)` expects arrays with one common sequence axis "
            f"in front, but got shapes {[jnp.shape(x) for x in jax.tree.leaves(xs)]}."
        )
    chunk_size = count("`linrec.scan_chunks(..., chunk_size=...)`", chunk_size)
    ((T,),) = lengths
    if chunk_size >= T:
        return function(xs, state)

    # In a loop, common subexpressions cannot undo the checkpoint: no need to guard against it.
    @partial(jax.checkpoint, prevent_cse=False)
    def run_chunk(carry, chunk):
        first, state = carry
        if truncate:
            known = lambda x: jnp.where(first, x, jax.lax.stop_gradient(x))
            state = jax.tree.map(lambda x: known(x) if eqx.is_inexact_array(x) else x, state)
        ys, state = function(chunk, state)
        return (jnp.zeros_like(first), state), ys

    @partial(jax.checkpoint, prevent_cse=False)
    def run_group(carry, chunk):
        return _scan(run_chunk, chunk_size, carry, chunk)

    # Groups of chunks, then the chunks that are left, then the tokens that are left.
    plan = [(run_chunk, chunk_size), (run_chunk, T % chunk_size)]
    if two_level:
        plan.insert(0, (run_group, math.isqrt(T // chunk_size) * chunk_size))
    carry, pieces, begin = (jnp.ones((), bool), state), [], 0
    for run, size in plan:
        end = T - (T - begin) % size if size > 0 else begin
        if end > begin:
            carry, ys = _scan(run, size, carry, _cut(xs, begin, end))
            pieces.append(ys)
            begin = end
    return jax.tree.map(_join, *pieces), carry[1]


def _cut(xs, begin, end):
    return jax.tree.map(lambda x: x[begin:end], xs)


def _scan(run, size, carry, xs):
    """Scans `run` over pieces of `size` tokens and joins what comes out."""
    cut = lambda x: x.reshape(x.shape[0] // size, size, *x.shape[1:])
    carry, ys = jax.lax.scan(run, carry, jax.tree.map(cut, xs))
    merge = lambda y: (
        jnp.sum(y, axis=0, dtype=y.dtype) if y.ndim == 1 else y.reshape(-1, *y.shape[2:])
    )
    return carry, jax.tree.map(merge, ys)


def _join(*pieces):
    return sum(pieces) if pieces[0].ndim == 0 else jnp.concatenate(pieces)
