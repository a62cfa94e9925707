import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linrec import nn


def make_model(num_layers=2, make_mixer=None, **options):
    make_mixer = make_mixer or (
        lambda layer_idx, key: nn.Retention(8, 2, dtype=jnp.float32, key=key)
    )
    return nn.LanguageModel(
        make_mixer, num_layers, 11, mlp_size=8, dtype=jnp.float32, **options, key=jax.random.key(0)
    )


def lightning(num_layers):
    return lambda layer_idx, key: nn.LightningAttention(
        8, 2, layer_idx=layer_idx, num_layers=num_layers, dtype=jnp.float32, key=key
    )


def hybrid(layer_idx, key):
    if layer_idx % 3 == 2:
        return nn.SlidingWindowAttention(8, 2, window=3, dtype=jnp.float32, key=key)
    return nn.Retention(8, 2, dtype=jnp.float32, key=key)


@pytest.mark.parametrize(
    ("make_mixer", "num_layers", "pattern"),
    [(None, 5, 1), (lightning(4), 4, 1), (hybrid, 6, 3), (hybrid, 4, 4)],
)
def test_the_stack_finds_its_pattern(make_mixer, num_layers, pattern):
    model = make_model(num_layers, make_mixer)
    assert len(model.pattern) == pattern
    assert model.pattern[0].mlp.output.weight.shape[0] == num_layers // pattern


def test_compile_time_does_not_grow_with_depth():
    equations = []
    for depth in (2, 12):
        model = make_model(depth, lightning(depth))
        closed = jax.make_jaxpr(lambda tokens, model=model: model(tokens)[0])(jnp.arange(5))
        equations.append(len(str(closed).splitlines()))
    assert equations[0] == equations[1]


def test_the_stack_is_its_blocks_in_order():
    model = make_model(4, lightning(4))
    tokens = jnp.array([3, 1, 4, 1, 5])
    x = model.embedding.weight[tokens]
    for layer in range(4):
        block = jax.tree.map(lambda p, layer=layer: p[layer], model.pattern[0])
        x, _ = eqx.filter_jit(block)(x)
    expected = jax.vmap(model.norm)(x) @ model.embedding.weight.T
    logits, _ = eqx.filter_jit(model)(tokens)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def test_free_head():
    model = make_model(tie_head=False)
    assert model.head is not None
    logits, _ = eqx.filter_jit(model)(jnp.arange(4))
    assert logits.shape == (4, 11)
    assert logits.dtype == jnp.float32


@pytest.mark.parametrize("cu_seqlens", [None, jnp.array([0, 3, 9])])
def test_checkpoint(cu_seqlens):
    """The same answers and gradients; what is inside of blocks is not kept."""
    tokens = jnp.arange(10) % 11

    def of_model(checkpoint):
        model = make_model(4, lightning(4), checkpoint=checkpoint)
        loss = lambda model: model.loss(tokens[:-1], tokens[1:], cu_seqlens=cu_seqlens)[0]
        results = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
        kept = jax.eval_shape(lambda model: jax.vjp(loss, model)[1], model)
        return jax.tree.leaves(results), sum(x.size for x in jax.tree.leaves(kept))

    (expected, everything), (actual, kept) = of_model(False), of_model(True)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5)
    assert kept < everything / 2


def test_loss():
    model = make_model()
    tokens, targets = jnp.array([3, 1, 4, 1, 5]), jnp.array([1, 4, 1, 5, 9])
    logits, state = eqx.filter_jit(model)(tokens)
    loss, loss_state = eqx.filter_jit(model.loss)(tokens, targets)
    expected = -np.sum(np.asarray(jax.nn.log_softmax(logits))[np.arange(5), targets])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert jax.tree.structure(loss_state) == jax.tree.structure(state)


def test_targets_that_do_not_count():
    model = make_model()
    loss = eqx.filter_jit(model.loss)
    tokens, targets = jnp.array([3, 1, 4, 1, 5]), jnp.array([1, 4, -100, -1, 99])
    packed, _ = loss(tokens, targets, cu_seqlens=jnp.array([0, 4], jnp.int32))
    np.testing.assert_allclose(packed, loss(tokens[:2], targets[:2])[0], rtol=1e-5)
    assert jnp.isnan(loss(tokens, targets)[0])  # 99 is no token


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (jnp.zeros((1,), jnp.int32), ValueError, "expects a target for each token"),
        (jnp.zeros((2,)), TypeError, "expects targets that are integers"),
    ],
)
def test_wrong_targets(targets, error, message):
    with pytest.raises(error, match=message):
        make_model(1).loss(jnp.array([3, 1]), targets)


def test_mixers_of_different_sizes():
    make_mixer = lambda layer_idx, key: nn.Retention(4 + 4 * layer_idx, 1, key=key)
    with pytest.raises(ValueError, match=r"expects mixers of one size, but they have \[4, 8\]"):
        make_model(2, make_mixer)


def test_learns():
    """A cycle of tokens is learnt in a few steps."""
    import optax

    model = make_model()
    tokens = jnp.tile(jnp.arange(7), 4)
    optimiser = optax.adam(1e-2)

    @eqx.filter_value_and_grad
    def loss(model):
        return model.loss(tokens[:-1], tokens[1:])[0] / 27

    @eqx.filter_jit
    def train(model):
        arrays, static = eqx.partition(model, eqx.is_inexact_array)

        def body(carry, _):
            arrays, optimiser_state = carry
            value, gradient = loss(eqx.combine(arrays, static))
            updates, optimiser_state = optimiser.update(gradient, optimiser_state)
            return (eqx.apply_updates(arrays, updates), optimiser_state), value

        (arrays, _), values = jax.lax.scan(body, (arrays, optimiser.init(arrays)), length=60)
        return eqx.combine(arrays, static), values

    with jax.numpy_dtype_promotion("standard"):  # optax is not strict
        trained, values = train(model)
    assert values[-1] < 0.1 * values[0]
    for before, after in zip(
        jax.tree.leaves(model.state), jax.tree.leaves(trained.state), strict=True
    ):
        np.testing.assert_array_equal(before, after)
