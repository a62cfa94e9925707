from collections.abc import Callable
from numbers import Real
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from .._inputs import count
from ._layer import AbstractLayer
from ._sample import sample


def generate(
    model: AbstractLayer,
    prompt: Int[Array, " prompt"],
    max_tokens: int,
    key: PRNGKeyArray,
    temperature: float | Float[Array, ""] = 1.0,
    top_k: int | Int[Array, ""] | None = None,
    top_p: float | Float[Array, ""] | None = None,
    stop: int | Int[Array, ""] | None = None,
    *,
    state: PyTree[Array] | None = None,
    callback: Callable[[np.ndarray], Any] | None = None,
) -> tuple[Int[Array, " max_tokens"], PyTree[Array]]:
    """Continues a prompt.

    The prompt runs as a whole sequence, then tokens are drawn one after the other, all in one
    compiled program. For a batch of prompts, use `jax.vmap`.

    !!! example

        ```python
        import jax
        import linrec

        make_mixer = lambda layer_idx, key: linrec.nn.Retention(64, key=key)
        model = linrec.nn.LanguageModel(make_mixer, 2, vocab_size=256, key=jax.random.key(0))
        prompt = jax.numpy.array([1, 2, 3])
        tokens, state = linrec.nn.generate(model, prompt, 10, jax.random.key(1), top_k=5)
        # Go on where it ended:
        more, state = linrec.nn.generate(
            model, tokens[-1:], 10, jax.random.key(2), top_k=5, state=state
        )
        ```

    **Arguments:**

    - `model`: a [`linrec.nn.LanguageModel`][], or another layer from tokens to logits.
    - `prompt`: `(prompt,)` tokens, one at least.
    - `max_tokens`: how many tokens to draw at most.
    - `key`: for the draws.
    - `temperature`: what the logits are divided by. 0 takes the likeliest token.
    - `top_k`: draw from that many likeliest tokens only.
    - `top_p`: draw from the fewest likeliest tokens that have at least this probability together.
    - `stop`: the token that ends a text.
    - `state`: what came before the prompt. Defaults to the state that the model holds.
    - `callback`: called on the host with every token as soon as it is drawn, in order; under
        `jax.vmap`, with an array of the tokens of all texts. Another function compiles again.

    **Returns:** `(tokens, state)`. What follows a stop token is filled up with it. The state has
    seen everything but the last token.
    """
    if not isinstance(model, AbstractLayer):
        raise TypeError(
            "`linrec.nn.generate(model, ...)` expects a layer from tokens to logits, but got "
            f"{type(model)}."
        )
    prompt = jnp.asarray(prompt)
    if prompt.ndim != 1 or prompt.shape[0] == 0:
        raise ValueError(
            "`linrec.nn.generate(model, prompt, ...)` expects tokens of shape (seq,), one at "
            f"least, but got shape {prompt.shape}. For a batch of prompts, use `jax.vmap`."
        )
    for argument, number in (("prompt", prompt), ("stop", stop), ("top_k", top_k)):
        if number is not None and not jnp.issubdtype(jnp.asarray(number).dtype, jnp.integer):
            raise TypeError(
                f"`linrec.nn.generate(..., {argument}=...)` expects integers, but got {number}."
            )
    if stop is not None and jnp.asarray(stop).ndim != 0:
        raise ValueError(f"`linrec.nn.generate(..., stop=...)` expects one token, but got {stop}.")
    max_tokens = count("`linrec.nn.generate(..., max_tokens=...)`", max_tokens, least=0)
    # Arrays go unchecked: their values may be on a device, or not known yet.
    if isinstance(temperature, Real) and not temperature >= 0:
        raise ValueError(
            "`linrec.nn.generate(..., temperature=...)` must not be negative, but is "
            f"{temperature}."
        )
    if isinstance(top_k, Real) and not top_k >= 1:
        raise ValueError(f"`linrec.nn.generate(..., top_k=...)` expects 1 or more, but is {top_k}.")
    if isinstance(top_p, Real) and not 0 < top_p <= 1:
        raise ValueError(
            "`linrec.nn.generate(..., top_p=...)` expects a probability above 0, up to 1, but is "
            f"{top_p}."
        )
    # As arrays, so that other values do not compile again.
    as_array = lambda x, dtype: None if x is None else jnp.asarray(x, dtype)
    return _generate(
        model,
        prompt.astype(jnp.int32),
        max_tokens,
        key,
        as_array(temperature, jnp.float32),
        as_array(top_k, jnp.int32),
        as_array(top_p, jnp.float32),
        as_array(stop, jnp.int32),
        state,
        callback,
    )


@eqx.filter_jit
def _generate(model, prompt, max_tokens, key, temperature, top_k, top_p, stop, state, callback):
    state = model.initial_state() if state is None else state
    if prompt.shape[0] > 1:
        # The last token of the prompt goes through `step`: its logits are the only ones needed.
        _, state = model(prompt[:-1], state)
    filler = jnp.zeros((), jnp.int32) if stop is None else stop
    tokens = jnp.broadcast_to(filler, (max_tokens,))
    if max_tokens == 0:
        return tokens, state
    stopped = lambda token: jnp.zeros((), bool) if stop is None else token == stop

    def unfinished(carry):
        i, done, *_ = carry
        return (i < max_tokens) & ~done

    def draw(carry):
        i, done, token, tokens, state = carry
        logits, state = model.step(token, state)
        token = sample(logits, jax.random.fold_in(key, i), temperature, top_k, top_p)
        if callback is not None:
            # In a batch, texts that have ended are still drawn for until all have.
            _emit(callback)(jnp.where(done, filler, token))
        return i + 1, stopped(token), token, tokens.at[i].set(token), state

    # A stop token at the end of the prompt ends the text before, not this one.
    carry = (jnp.zeros((), jnp.int32), jnp.zeros((), bool), prompt[-1], tokens, state)
    *_, tokens, state = jax.lax.while_loop(unfinished, draw, carry)
    return tokens, state


def _emit(callback: Callable[[np.ndarray], Any]):
    """Hands tokens to the host; the tokens of a batch together.

    Nothing says so, but the loop's iterations run one after the other, and so do these calls.
    (`ordered=True` would say so, and cannot be batched.)
    """

    @jax.custom_batching.custom_vmap
    def emit(tokens):
        jax.debug.callback(lambda tokens: callback(np.asarray(tokens)), tokens)
        return tokens

    @emit.def_vmap
    def rule(size, is_mapped, tokens):
        del size, is_mapped
        return _emit(callback)(tokens), True

    return emit
