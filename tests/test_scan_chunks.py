import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linrec


T = 23  # with chunks of 3: two groups of two chunks, three chunks, two tokens


def make_case():
    make_mixer = lambda layer_idx, key: linrec.nn.SimpleGatedLinearAttention(
        8, 2, conv_size=2, dtype=jnp.float32, key=key
    )
    model = linrec.nn.LanguageModel(
        make_mixer, 2, 11, mlp_size=8, dtype=jnp.float32, key=jax.random.key(0)
    )
    tokens = jax.random.randint(jax.random.key(1), (T + 1,), 0, 11)
    return model, (tokens[:-1], tokens[1:])


def chunked_loss(model, xs, **options):
    return linrec.scan_chunks(
        lambda chunk, state: model.loss(*chunk, state), xs, model.initial_state(), **options
    )[0]


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"two_level": True}])
def test_gradients_are_those_of_the_whole(options):
    model, xs = make_case()
    whole = lambda model, xs: model.loss(*xs)[0]
    expected = eqx.filter_jit(eqx.filter_value_and_grad(whole))(model, xs)
    pieces = lambda model, xs: chunked_loss(model, xs, chunk_size=3, **options)
    assert_close(eqx.filter_jit(eqx.filter_value_and_grad(pieces))(model, xs), expected)


def test_truncated():
    """What a chunk owes to those before it is left out."""
    model, xs = make_case()
    cut = jax.tree.map(lambda x: x[:6], xs)

    def in_two(model, xs):
        first, second = jax.tree.map(lambda x: x[:3], xs), jax.tree.map(lambda x: x[3:], xs)
        loss, state = model.loss(*first)
        return loss + model.loss(*second, jax.lax.stop_gradient(state))[0]

    expected = eqx.filter_jit(eqx.filter_value_and_grad(in_two))(model, cut)
    pieces = lambda model, xs: chunked_loss(model, xs, chunk_size=3, truncate=True)
    assert_close(eqx.filter_jit(eqx.filter_value_and_grad(pieces))(model, cut), expected)


@pytest.mark.parametrize("chunk_size", [1, 5, T, 100])
def test_outputs_are_joined(chunk_size):
    layer = linrec.nn.Retention(4, 1, dtype=jnp.float32, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (T, 4), jnp.float32)
    run = eqx.filter_jit(lambda x: linrec.scan_chunks(layer, x, layer.state, chunk_size))
    assert_close(run(x), eqx.filter_jit(layer)(x))


def test_memory_is_bounded():
    """Eight times the tokens take little more memory: states and tokens, not activations."""
    model, _ = make_case()
    arrays, static = eqx.partition(model, eqx.is_inexact_array)

    def temporaries(length, **options):
        xs = (jax.ShapeDtypeStruct((length,), jnp.int32),) * 2

        @jax.jit
        @jax.grad
        def gradient(arrays, xs):
            return chunked_loss(eqx.combine(arrays, static), xs, **options)

        compiled = gradient.lower(arrays, xs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = temporaries(512, chunk_size=64), temporaries(4096, chunk_size=64)
    two_level = temporaries(4096, chunk_size=64, two_level=True)
    whole = temporaries(4096, chunk_size=4096)
    assert long < 2 * short
    assert two_level < long
    assert long < whole / 8


@pytest.mark.parametrize(
    ("xs", "chunk_size", "message"),
    [
        ((jnp.ones((3, 2)), jnp.ones((4, 2))), 2, "one common sequence axis"),
        (jnp.ones(()), 2, "one common sequence axis"),
        (jnp.ones((3, 2)), 0, "expects 1 token or more"),
    ],
)
def test_mistakes(xs, chunk_size, message):
    with pytest.raises(ValueError, match=message):
        linrec.scan_chunks(lambda x, state: (x, state), xs, None, chunk_size)
