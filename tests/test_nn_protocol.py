"""What every layer promises: one token at a time, in pieces, packed or batched, it is the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linrec
from linrec.nn._timeline import sequence_timeline, token_timeline

from .helpers import count_compilations
from .nn_cases import layers, LENGTH, mixers, VOCAB


LAYERS = layers(dtype=jnp.float32)
every_layer = pytest.mark.parametrize("name", LAYERS)
# For what does not depend on the kind of layer.
some_layers = pytest.mark.parametrize("name", ["gated_linear_attention", "block", "hybrid_model"])


def make(name):
    return LAYERS[name](jax.random.key(0))


def make_input(layer, seed=1, length=LENGTH, dtype=jnp.float32):
    key = jax.random.key(seed)
    if layer.token_shape == ():
        return jax.random.randint(key, (length,), 0, VOCAB)
    return jax.random.normal(key, (length, *layer.token_shape), dtype)


@eqx.filter_jit
def run(layer, x, state=None, **options):
    return layer(x, state, **options)


@eqx.filter_jit
def run_steps(layer, x):
    def body(state, x_t):
        y, state = layer.step(x_t, state)
        return state, y

    state, y = jax.lax.scan(body, layer.initial_state(), x)
    return y, state


def assert_close(actual, expected, tolerance=1e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        scale = np.max(np.abs(np.asarray(b, np.float64)), initial=1e-30)
        error = np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)), initial=0)
        assert error <= tolerance * scale


@every_layer
def test_steps_are_the_call(name):
    layer = make(name)
    x = make_input(layer)
    assert_close(run_steps(layer, x), run(layer, x))


def test_without_jit_it_compiles_once():
    layer = make("hybrid_model")
    x = make_input(layer)

    def everything():
        _, state = layer(x)
        layer.step(x[0], state)
        eqx.filter_grad(lambda layer: jnp.sum(layer(x)[0]))(layer)

    everything()
    with count_compilations() as compilations:
        everything()
    assert compilations == []


@every_layer
def test_cut_anywhere(name):
    layer = make(name)
    x = make_input(layer)
    whole, end = run(layer, x)

    @eqx.filter_jit
    def in_pieces(layer, x):
        state, pieces = None, []
        for begin, stop in ((0, 1), (1, 8), (8, 8), (8, LENGTH)):
            y, state = layer(x[begin:stop], state)
            pieces.append(y)
        return jnp.concatenate(pieces), state

    assert_close(in_pieces(layer, x), (whole, end))


@every_layer
def test_packed_is_separate(name):
    layer = make(name)
    x = make_input(layer)
    bounds = [0, 2, 2, 9, 12]  # one sequence is empty, and the last token is padding
    _, start = run(layer, make_input(layer, seed=2))
    starts = jax.tree.map(lambda s: jnp.stack([jnp.zeros_like(s), s, s, s]), start)
    packed, ends = run(layer, x, starts, cu_seqlens=jnp.array(bounds))

    @eqx.filter_jit
    def separate(layer, x, starts):
        results = [
            layer(x[bounds[n] : bounds[n + 1]], jax.tree.map(lambda s, n=n: s[n], starts))
            for n in range(4)
        ]
        y = jnp.concatenate([y for y, _ in results])
        return y, jax.tree.map(lambda *s: jnp.stack(s), *[state for _, state in results])

    assert_close((packed[:12], ends), separate(layer, x, starts))
    assert np.all(np.isfinite(packed))


@pytest.mark.parametrize("name", mixers())
def test_padding_may_hold_anything(name):
    layer = make(name)
    x, bounds = make_input(layer), jnp.array([0, 5, 9])

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer_and_x):
        layer, x = layer_and_x
        return jnp.sum(jnp.sin(layer(x, cu_seqlens=bounds)[0][:9]))

    bad = jnp.where(jnp.arange(x.shape[0])[:, None] < 9, x, jnp.nan)
    assert_close(gradient((layer, bad)), gradient((layer, x)), 0)


@some_layers
def test_packed_starts_from_the_held_state(name):
    layer = make(name)
    x = make_input(layer, length=5)
    y, end = run(layer, x)
    twice, ends = run(layer, jnp.concatenate([x, x]), cu_seqlens=jnp.array([0, 5, 10]))
    assert_close(twice, jnp.concatenate([y, y]))
    assert_close(ends, jax.tree.map(lambda s: jnp.stack([s, s]), end))


@every_layer
def test_vmap_is_a_loop(name):
    layer = make(name)
    x = jnp.stack([make_input(layer, seed) for seed in (1, 2, 3)])
    states = jax.tree.map(lambda *s: jnp.stack(s), *[run(layer, row)[1] for row in x])
    batched = eqx.filter_jit(eqx.filter_vmap(lambda x, state: layer(x, state)))(x, states)
    loop = [run(layer, row, jax.tree.map(lambda s, n=n: s[n], states)) for n, row in enumerate(x)]
    assert_close(batched, jax.tree.map(lambda *leaves: jnp.stack(leaves), *loop))


@every_layer
def test_causal(name):
    layer = make(name)
    x = make_input(layer)
    y, _ = run(layer, x)
    for t in (0, 6, LENGTH - 1):
        changed = x.at[t].set(make_input(layer, seed=3)[t])
        assert np.any(np.asarray(changed != x))
        y_changed, _ = run(layer, changed)
        np.testing.assert_array_equal(y_changed[:t], y[:t])
        assert np.any(np.asarray(y_changed[t:] != y[t:]))


def test_one_token_takes_every_gate():
    x = jax.random.normal(jax.random.key(0), (1, 2, 4), jnp.float32)
    gates = {"g": -x[..., 0], "gk": -x, "gv": -x, "g_gamma": -x[0, :, 0]}
    hidden = jnp.ones((2, 4, 4), jnp.float32)
    token, sequence = token_timeline(), sequence_timeline(1, None, linrec.Scan())
    assert_close(
        token.recurrent(x, x, x, hidden, **gates), sequence.recurrent(x, x, x, hidden, **gates)
    )


@some_layers
def test_with_state(name):
    layer = make(name)
    x = make_input(layer)
    _, state = run(layer, x)
    held = layer.with_state(state)
    assert type(held) is type(layer)
    assert_close(held.state, state, 0)
    assert_close(run(held, x), run(layer, x, state), 0)


@every_layer
def test_bfloat16(name):
    layer = layers(dtype=jnp.bfloat16)[name](jax.random.key(0))
    x = make_input(layer, dtype=jnp.bfloat16)
    prefill, end = run(layer, x)
    decoded, decoded_end = run_steps(layer, x)
    assert_close(decoded, prefill, 1e-2)
    assert_close(decoded_end, end, 1e-2)
    states = jax.tree.leaves(end, is_leaf=lambda s: isinstance(s, linrec.nn.RecurrentState))
    for state in states:
        if isinstance(state, linrec.nn.RecurrentState):
            assert state.hidden.dtype == jnp.float32


def test_the_normaliser_outgrows_float16():
    """It is a sum over all tokens."""
    narrow = linrec.nn.LinearAttention(8, 1, dtype=jnp.float16, key=jax.random.key(0))
    exact = jax.tree.map(lambda x: x.astype(float) if eqx.is_inexact_array(x) else x, narrow)
    x = 20 * jax.random.normal(jax.random.key(1), (2000, 8), jnp.float16)
    assert_close(run(narrow, x)[0].astype(float), run(exact, x.astype(float))[0], 5e-3)


@pytest.mark.parametrize("name", ["gated_linear_attention", "sliding_window_attention"])
def test_options_reach_the_recurrence(name):
    layer = make(name)
    x = make_input(layer)
    expected = run(layer, x)
    assert_close(run(layer, x, method=linrec.Scan()), expected)
    assert_close(run(layer, x, chunk_size=4), expected)


@pytest.mark.parametrize("name", mixers())
def test_every_parameter_has_a_gradient(name):
    """And what is not a parameter has none: the state, and constants that are arrays."""
    layer = make(name)
    x = make_input(layer)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer, x):
        return jnp.sum(jnp.sin(layer(x)[0]))

    constant = ("decay", "lower_bound")
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(layer, x)):
        name = jax.tree_util.keystr(path)
        is_parameter = not name.startswith(".state") and not name.endswith(constant)
        assert np.all(np.isfinite(leaf)), name
        assert bool(np.any(np.asarray(leaf) != 0)) == is_parameter, name
    # Gates that are all but open or shut.
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient(layer, 1e4 * x)))


def test_trainable_state():
    layer = linrec.nn.Retention(8, 2, trainable_state=True, conv_size=3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (5, 8))

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(layer, **options):
        return jnp.sum(jnp.sin(layer(x, **options)[0]))

    assert np.all(np.asarray(gradient(layer).state.hidden) != 0)
    assert np.any(np.asarray(gradient(layer).state.conv) != 0)
    packed = gradient(layer, cu_seqlens=jnp.array([0, 2, 5]))
    assert np.all(np.asarray(packed.state.hidden) != 0)
