"""Layers with the sequence axis sharded, against the same layers whole."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import linrec

from .helpers import relative_error
from .nn_cases import layers, SIZE, VOCAB
from .test_parallel import parallel


LAYERS = layers(dtype=jnp.float32)
KEY = jax.random.key(0)


def everything(layer, x, cu_seqlens, method):
    """Output, state, and the gradient through both."""

    def loss(layer):
        out = layer(x, cu_seqlens=cu_seqlens, method=method)
        floats = filter(lambda leaf: eqx.is_inexact_array(leaf), jax.tree.leaves(out))
        return sum(jnp.sum(jnp.sin(leaf)) for leaf in floats), out

    return eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(layer)


def assert_same(name, T, packing=None, shards=4):
    layer = LAYERS[name](KEY)
    x = jax.random.normal(KEY, (T, SIZE), jnp.float32)
    if not layer.token_shape:
        x = jax.random.randint(KEY, (T,), 0, VOCAB, jnp.int32)
    cu_seqlens = None if packing is None else jnp.array(packing, jnp.int32)
    actual = everything(layer, x, cu_seqlens, parallel(shards, linrec.Chunked(4)))
    expected = everything(layer, x, cu_seqlens, linrec.Chunked(4))
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.parametrize("name", LAYERS)
def test_packed(name):
    """Shards of 6 tokens: sequences that cross none, one and two of their boundaries."""
    assert_same(name, 21, (0, 0, 7, 8, 20))


@pytest.mark.parametrize(("name", "T"), [("mamba2", 16), ("mamba2", 5), ("hybrid_model", 13)])
def test_one_sequence(name, T):
    """Of whole shards; of shards shorter than a convolution's history; of ragged shards."""
    assert_same(name, T)


def test_states_carry_on():
    """A sequence that is cut, with both parts sharded, equals the sequence whole."""
    layer = LAYERS["gated_linear_attention"](KEY)
    x = jax.random.normal(KEY, (24, SIZE), jnp.float32)
    method = parallel(2, linrec.Chunked(4))
    run = eqx.filter_jit(lambda x, state: layer(x, state, method=method))
    first, state = run(x[:16], None)
    second, state = run(x[16:], state)
    expected, expected_state = layer(x)
    assert relative_error(jnp.concatenate([first, second]), expected) < 1e-5
    assert relative_error(state.hidden, expected_state.hidden) < 1e-5
    assert relative_error(state.conv, expected_state.conv) < 1e-5
    assert state.position == 24


def test_chunk_size():
    layer = LAYERS["gated_linear_attention"](KEY)
    x = jax.random.normal(KEY, (24, SIZE), jnp.float32)
    run = eqx.filter_jit(lambda x: layer(x, method=parallel(2, linrec.Chunked(4)), chunk_size=4)[0])
    assert relative_error(run(x), layer(x)[0]) < 1e-5


def test_wrong_boundaries_raise():
    layer = LAYERS["gated_linear_attention"](KEY)
    x = jnp.ones((8, SIZE), jnp.float32)
    with pytest.raises(Exception, match="must not decrease"):
        layer(x, cu_seqlens=jnp.array([0, 5, 3]), method=parallel(2))
