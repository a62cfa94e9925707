import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linrec import nn
from linrec.nn._sample import sample

from .helpers import count_compilations


PROMPT = jnp.array([3, 1, 4], jnp.int32)


@pytest.fixture(scope="module")
def model():
    return nn.LanguageModel(
        lambda layer_idx, key: nn.GatedLinearAttention(8, 2, dtype=jnp.float32, key=key),
        2,
        11,
        mlp_size=8,
        dtype=jnp.float32,
        key=jax.random.key(0),
    )


def test_greedy_is_the_argmax_of_the_whole_sequence(model):
    tokens, state = nn.generate(model, PROMPT, 5, jax.random.key(0), temperature=0.0)
    text = jnp.concatenate([PROMPT, tokens])
    logits, _ = eqx.filter_jit(model)(text)
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[2:-1], tokens)
    assert state[0].position.tolist() == [7, 7]


def test_compiles_once(model):
    arguments = [
        (prompt, jax.random.key(seed), jnp.float32(temperature), jnp.int32(k), jnp.float32(0.9))
        for seed, (prompt, temperature, k) in enumerate(((PROMPT, 1.0, 3), (PROMPT + 1, 0.5, 4)))
    ]
    with count_compilations() as compilations:
        for prompt, key, *options in arguments:
            nn.generate(model, prompt, 1000, key, *options)
    assert len(compilations) == 1


def test_vmap_is_a_loop(model):
    prompts = jnp.stack([PROMPT, PROMPT + 2])
    keys = jax.random.split(jax.random.key(1), 2)
    one = lambda prompt, key: nn.generate(model, prompt, 6, key)[0]
    batched = jax.vmap(one)(prompts, keys)
    np.testing.assert_array_equal(batched, jnp.stack([one(prompts[i], keys[i]) for i in range(2)]))


@pytest.mark.parametrize("batched", [False, True])
def test_stop_and_streaming(model, batched):
    free, _ = nn.generate(model, PROMPT, 6, jax.random.key(1))
    stop = int(free[2])
    length = int(np.argmax(np.asarray(free) == stop)) + 1
    streamed = []
    run = lambda prompt: nn.generate(
        model, prompt, 6, jax.random.key(1), stop=stop, callback=streamed.append
    )
    tokens, state = jax.vmap(run)(PROMPT[None]) if batched else run(PROMPT)
    jax.effects_barrier()
    expected = np.where(np.arange(6) < length, free, stop)
    np.testing.assert_array_equal(tokens[0] if batched else tokens, expected)
    assert np.array(streamed).ravel().tolist() == expected[:length].tolist()
    assert np.all(np.asarray(state[0].position) == 3 + length - 1)


def test_sample():
    logits = jnp.log(jnp.array([0.1, 0.5, 0.15, 0.25], jnp.float32))

    @jax.jit
    def drawn(temperature, top_k, top_p):
        keys = jax.random.split(jax.random.key(0), 4000)
        draw = lambda key: sample(logits, key, temperature, top_k, top_p)
        return jnp.bincount(jax.vmap(draw)(keys), length=4) / 4000

    def check(expected, temperature=1.0, top_k=4, top_p=1.0):
        actual = drawn(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p))
        np.testing.assert_allclose(actual, expected, atol=0.03)

    check([0.1, 0.5, 0.15, 0.25])
    check([0, 1, 0, 0], temperature=0.0)
    check([0, 1, 0, 0], top_k=0)
    check([0, 1, 0, 0], top_k=1)
    check([0, 2 / 3, 0, 1 / 3], top_k=2)
    check([0, 1, 0, 0], top_p=0.4)
    check([0, 2 / 3, 0, 1 / 3], top_p=0.6)
    check([0, 5 / 9, 1.5 / 9, 2.5 / 9], top_p=0.8)
    squares = np.array([0.1, 0.5, 0.15, 0.25]) ** 2
    check(squares / squares.sum(), temperature=0.5)


def test_ties():
    """The first of equally likely tokens is the likelier, as it is for `argmax`."""
    keys = jax.random.split(jax.random.key(0), 50)
    logits, one = jnp.array([0.0, 1.0, 1.0, 1.0]), jnp.float32(1.0)
    draw = lambda **options: {
        int(token)
        for token in jax.vmap(
            lambda key: sample(logits, key, one, **{"top_k": None, "top_p": None} | options)
        )(keys)
    }
    assert draw(top_k=jnp.int32(1)) == draw(top_p=jnp.float32(1e-6)) == {1}
    assert draw(top_k=jnp.int32(2)) == draw(top_p=jnp.float32(0.5)) == {1, 2}


def test_no_tokens(model):
    tokens, state = nn.generate(model, PROMPT, 0, jax.random.key(0))
    assert tokens.shape == (0,)
    assert state[0].position.tolist() == [2, 2]


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": jnp.zeros((2, 3), int)}, "expects tokens of shape"),
        ({"prompt": jnp.zeros((0,), int)}, "one at least"),
        ({"temperature": -1.0}, "temperature=...)` must not be negative"),
        ({"top_k": 0}, "top_k=...)` expects 1 or more"),
        ({"top_p": 1.5}, "top_p=...)` expects a probability"),
        ({"top_p": np.float32(1.5)}, "top_p=...)` expects a probability"),
        ({"top_k": np.int32(0)}, "top_k=...)` expects 1 or more"),
        ({"temperature": float("nan")}, "temperature=...)` must not be negative"),
        ({"max_tokens": -1}, "expects 0 or more"),
        ({"max_tokens": 2.5}, "expects an integer, but got 2.5"),
        ({"prompt": jnp.ones((2,))}, "`linrec.nn.generate(..., prompt=...)` expects integers"),
        ({"stop": 3.7}, "expects integers, but got 3.7"),
        ({"stop": [1, 2]}, "expects one token, but got [1, 2]"),
        ({"top_k": 2.5}, "expects integers, but got 2.5"),
    ],
)
def test_mistakes(model, options, message):
    arguments = {"prompt": PROMPT, "max_tokens": 2, "key": jax.random.key(0), **options}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        nn.generate(model, **arguments)
