"""States are saved, exported, donated and shuffled about like any other arrays."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linrec import nn

from .nn_cases import layers, VOCAB


def make_model():
    return layers(dtype=jnp.float32)["hybrid_model"](jax.random.key(0))


@eqx.filter_jit
def continue_text(model, token, state):
    return nn.generate(model, token[None], 6, jax.random.key(0), 0.0, state=state)


def mid_generation(model):
    tokens, state = nn.generate(model, jnp.array([1, 2, 3]), 6, jax.random.key(0), 0.0)
    return tokens[-1], state


def test_serialise_leaves():
    model = make_model()
    token, state = mid_generation(model)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    restored = eqx.tree_deserialise_leaves(file, model.state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(before, after)
    expected, _ = continue_text(model, token, state)
    actual, _ = continue_text(model, token, restored)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.filterwarnings("ignore")
def test_orbax(tmp_path):
    import orbax.checkpoint as ocp

    model = make_model()
    _, state = mid_generation(model)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
        restored = checkpointer.restore(tmp_path / "state", like)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.core
@pytest.mark.parametrize("name", ["gated_linear_attention", "sliding_window_attention"])
def test_export(name):
    """A step as bytes, with states of either kind."""
    layer = layers(dtype=jnp.float32)[name](jax.random.key(0))
    x = jnp.ones(layer.token_shape, jnp.float32)
    exported = jax.export.export(jax.jit(lambda x, state: layer.step(x, state)))(x, layer.state)
    again = jax.export.deserialize(exported.serialize())
    expected, actual = layer.step(x, layer.state), again.call(x, layer.state)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_donate():
    """Nothing of the state is copied: every donated buffer is used (if not, JAX warns)."""
    layer = nn.GatedLinearAttention(12, 2, conv_size=3, dtype=jnp.float32, key=jax.random.key(0))
    stack = lambda s: jnp.stack([s] * 3)
    states = jax.tree.map(stack, layer.state)
    step = jax.jit(jax.vmap(lambda x, state: layer.step(x, state)), donate_argnums=1)
    _, after = step(jnp.ones((3, 12), jnp.float32), states)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(states))
    np.testing.assert_array_equal(after.position, [1, 1, 1])


def test_donated_initial_state_is_not_the_layers_own():
    model = make_model()
    step = eqx.filter_jit(lambda model, x, state: model.step(x, state), donate="all-except-first")
    step(model, jnp.array(1), model.initial_state())
    assert not any(x.is_deleted() for x in jax.tree.leaves(model) if isinstance(x, jax.Array))


def test_a_table_of_states():
    """Insert, evict and reorder the states of texts that are at different places."""
    model = make_model()
    run = eqx.filter_jit(lambda tokens: model(tokens)[1])
    long, short = run(jnp.arange(7)), run(jnp.arange(4))
    table = jax.tree.map(lambda s: jnp.zeros((4, *s.shape), s.dtype), model.state)
    table = jax.tree.map(lambda t, s: t.at[2].set(s), table, long)
    table = jax.tree.map(lambda t, s: t.at[0].set(s), table, short)
    table = jax.tree.map(lambda t: t[jnp.array([2, 1, 0, 3])], table)
    step = eqx.filter_jit(eqx.filter_vmap(model.step))
    logits, table = step(jnp.array([5, 0, 5, 0]), table)
    for row, state in ((0, long), (2, short)):
        expected, _ = eqx.filter_jit(model.step)(jnp.array(5), state)
        np.testing.assert_allclose(logits[row], expected, rtol=1e-5, atol=1e-6)
    assert logits.shape == (4, VOCAB)


def test_packed_prefill_feeds_a_batch():
    """The state of packed sequences is a batch of states."""
    model = make_model()
    tokens = jnp.arange(9)
    _, states = eqx.filter_jit(model)(tokens, cu_seqlens=jnp.array([0, 4, 9]))
    logits, _ = eqx.filter_jit(eqx.filter_vmap(model.step))(jnp.array([1, 2]), states)
    expected, _ = eqx.filter_jit(model)(jnp.append(tokens[4:], 2))
    np.testing.assert_allclose(logits[1], expected[-1], rtol=1e-5, atol=1e-6)


def assert_trainable_is_what_has_a_gradient(layer, x):
    gradients = eqx.filter_grad(lambda layer: jnp.sum(jnp.sin(layer(x)[0])))(layer)
    mask = nn.trainable(layer)
    assert jax.tree.structure(mask) == jax.tree.structure(layer)
    marked = eqx.filter(gradients, mask), eqx.filter(gradients, mask, inverse=True)
    has_gradient, has_none = (jax.tree.leaves(part) for part in marked)
    assert len(has_gradient) > 1
    assert all(jnp.any(g != 0) for g in has_gradient)
    assert not any(jnp.any(g != 0) for g in has_none)


@pytest.mark.parametrize("name", ["lightning_attention", "hgrn2", "hybrid_model"])
def test_trainable(name):
    layer = layers(dtype=jnp.float32)[name](jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (9, *layer.token_shape), jnp.float32)
    assert_trainable_is_what_has_a_gradient(layer, x if x.ndim > 1 else jnp.arange(9))


def test_trainable_state():
    options = dict(conv_size=3, trainable_state=True, dtype=jnp.float32, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (9, 8), jnp.float32)
    layer = nn.HGRN2(8, 2, key_size=4, lower_bound=0.5, **options)
    assert_trainable_is_what_has_a_gradient(layer, x)
    mask = nn.trainable({"layer": layer, "step": 3})
    assert mask["layer"].state.hidden
    assert not mask["layer"].lower_bound
    assert mask["step"] is False


class Pair(nn.AbstractMixer):
    """A mixer of mixers."""

    first: nn.AbstractMixer
    second: nn.AbstractMixer
    size: int = eqx.field(static=True)
    trainable_state: bool = eqx.field(static=True, default=False)

    @property
    def state(self):
        return self.first.state, self.second.state

    def run(self, x, state, time):
        x, first = self.first.run(x, state[0], time)
        x, second = self.second.run(x, state[1], time)
        return x, (first, second)


def test_mixers_in_a_mixer():
    key = jax.random.key(0)
    lightning = nn.LightningAttention(8, 2, layer_idx=1, num_layers=3, dtype=jnp.float32, key=key)
    pair = Pair(lightning, nn.Retention(8, 2, dtype=jnp.float32, key=key), 8)
    x = jax.random.normal(jax.random.key(1), (9, 8), jnp.float32)
    assert_trainable_is_what_has_a_gradient(pair, x)
    narrow = jax.tree.map(lambda x: x.astype(jnp.float16) if eqx.is_inexact_array(x) else x, pair)
    assert all(state.hidden.dtype == jnp.float32 for state in narrow.initial_state())
