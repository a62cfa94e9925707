import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linrec


T = 14  # with chunks of 3: two groups of two chunks and two tokens


@functools.cache
def make_case():
    make_mixer = lambda layer_idx, key: linrec.nn.SimpleGatedLinearAttention(
        8, 2, conv_size=2, dtype=jnp.float32, key=key
    )
    model = linrec.nn.LanguageModel(
        make_mixer, 1, 11, mlp_size=8, dtype=jnp.float32, key=jax.random.key(0)
    )
    tokens = jax.random.randint(jax.random.key(1), (T + 1,), 0, 11)
    return model, (tokens[:-1], tokens[1:])


@functools.cache
def whole_gradient():
    model, xs = make_case()
    return eqx.filter_jit(eqx.filter_value_and_grad(lambda model: model.loss(*xs)[0]))(model)


def chunked_gradient(**options):
    model, xs = make_case()

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def gradient(model):
        loss = lambda chunk, state: model.loss(*chunk, state)
        return linrec.scan_chunks(loss, xs, model.initial_state(), 3, **options)[0]

    return gradient(model)


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("two_level", [False, True])
def test_gradients_are_those_of_the_whole(two_level):
    assert_close(chunked_gradient(two_level=two_level), whole_gradient())


def test_truncated():
    """The loss is the same. What a chunk owes to those before it is left out of the gradient."""
    model, xs = make_case()

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def by_hand(model):
        def body(state, chunk):
            loss, state = model.loss(*chunk, jax.lax.stop_gradient(state))
            return state, loss

        chunks = jax.tree.map(lambda x: x[:12].reshape(4, 3), xs)
        state, losses = jax.lax.scan(body, model.initial_state(), chunks)
        rest = jax.tree.map(lambda x: x[12:], xs)
        return jnp.sum(losses) + model.loss(*rest, jax.lax.stop_gradient(state))[0]

    value, gradient = chunked_gradient(truncate=True)
    assert_close((value, gradient), by_hand(model))
    np.testing.assert_allclose(value, whole_gradient()[0], rtol=1e-5)
    assert not np.allclose(gradient.embedding.weight, whole_gradient()[1].embedding.weight)


@pytest.mark.parametrize(("chunk_size", "expected"), [(2, 1), (3, 3), (6, 15), (100, 15)])
def test_truncated_gradient_of_the_first_state(chunk_size, expected):
    """It is that of the first chunk, which nothing cuts off from it."""
    x = jnp.arange(6.0)
    function = lambda x, state: (jnp.sum(x * state), state + jnp.sum(x))
    run = lambda state: linrec.scan_chunks(function, x, state, chunk_size, truncate=True)[0]
    assert jax.grad(run)(jnp.array(1.0)) == expected


@pytest.mark.parametrize("chunk_size", [5, T - 1, 100])
def test_outputs_are_joined(chunk_size):
    layer = linrec.nn.Retention(4, 1, dtype=jnp.float32, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (T, 4), jnp.float32)
    run = eqx.filter_jit(lambda x: linrec.scan_chunks(layer, x, layer.state, chunk_size))
    assert_close(run(x), eqx.filter_jit(layer)(x))


def test_memory_is_bounded():
    layer = linrec.nn.Retention(8, 1, None, 32, 32, dtype=jnp.float32, key=jax.random.key(0))
    arrays, static = eqx.partition(layer, eqx.is_inexact_array)

    def temporaries(*arguments, **options):
        @jax.jit
        @jax.grad
        def gradient(arrays, x):
            layer = eqx.combine(arrays, static)

            def loss(x, state):
                y, state = layer(x, state)
                return jnp.sum(jnp.sin(y)), state

            return linrec.scan_chunks(loss, x, layer.initial_state(), *arguments, **options)[0]

        compiled = gradient.lower(arrays, jnp.zeros((4096, 8), jnp.float32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Chunks of 256 tokens keep little, chunks of 8 tokens many states.
    assert temporaries(256) < temporaries(4096) / 4
    assert temporaries(8, two_level=True) < temporaries(8) / 4


@pytest.mark.parametrize(
    ("xs", "chunk_size", "message"),
    [
        ((jnp.ones((3, 2)), jnp.ones((4, 2))), 2, "one common sequence axis"),
        (jnp.ones(()), 2, "one common sequence axis"),
        (jnp.ones((3, 2)), 0, "expects 1 or more, but got 0"),
    ],
)
def test_mistakes(xs, chunk_size, message):
    with pytest.raises(ValueError, match=message):
        linrec.scan_chunks(lambda x, state: (x, state), xs, None, chunk_size)


@pytest.mark.parametrize("chunk_size", [5, 100])
def test_counts_keep_their_dtype(chunk_size):
    count = lambda x, state: (jnp.sum(x > 0, dtype=jnp.int32), state)
    total, _ = linrec.scan_chunks(count, jnp.arange(T), (), chunk_size)
    assert total == T - 1
    assert total.dtype == jnp.int32
