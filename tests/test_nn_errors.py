"""Mistakes have errors in the caller's words."""

import jax
import jax.numpy as jnp
import pytest

from linrec import nn


pytestmark = pytest.mark.usefixtures("no_type_checks")

KEY = jax.random.key(0)


def make(kind=nn.GatedLinearAttention, *arguments, **options):
    return kind(8, *arguments, **options, dtype=jnp.float32, key=KEY)


X = jnp.ones((5, 8), jnp.float32)

CALLS = {
    "batched input": (
        lambda: make()(X[None]),
        r"`GatedLinearAttention\(x\)` expects `x` of shape \(seq, 8\), .*use `jax.vmap`",
    ),
    "other channels": (lambda: make()(X[:, :7]), r"shape \(seq, 8\)"),
    "sequence to step": (
        lambda: make().step(X),
        r"`GatedLinearAttention.step\(x\)` expects `x` of shape \(8,\)",
    ),
    "batched state": (
        lambda: make()(X, jax.tree.map(lambda s: s[None], make().state)),
        r"`GatedLinearAttention\(x, state\)` expects a state of the shapes(.|\n)*use `jax.vmap`",
    ),
    "state of another layer": (
        lambda: make()(X, make(conv_size=3).state),
        "expects a state of the shapes",
    ),
    "one state for packed sequences": (
        lambda: make()(X, make().state, cu_seqlens=jnp.array([0, 2, 5])),
        "expects for 2 packed sequences a state",
    ),
    "with_state": (
        lambda: make().with_state(jax.tree.map(lambda s: s[None], make().state)),
        r"with_state\(state\)` expects a state",
    ),
    "heads that do not divide": (lambda: make(num_heads=3), "Pass `key_size`"),
    "kv heads that do not divide": (
        lambda: make(num_heads=4, num_kv_heads=3),
        r"`num_kv_heads` \(3\) has to divide `num_heads` \(4\)",
    ),
    "odd rotary": (lambda: make(nn.Retention, 2, key_size=3), "`key_size` has to be even"),
    "gate_temperature": (lambda: make(gate_temperature=0), "`gate_temperature` expects a number"),
    "gate_rank": (lambda: make(gate_rank=0), "`gate_rank` expects 1 or more"),
    "rotary_base": (lambda: make(nn.Retention, 2, rotary_base=0), "`rotary_base` expects a number"),
    "dt_range": (
        lambda: make(nn.Mamba2, 2, value_size=8, dt_range=(0.0, 0.1)),
        "`dt_range` expects a number above 0",
    ),
    "features": (lambda: nn.DPFP(0), r"`DPFP\(nu\)` expects 1 or more"),
    "conv_size": (lambda: make(conv_size=0), "`conv_size` expects"),
    "slopes": (
        lambda: make(nn.LightningAttention, 2, layer_idx=0, num_layers=1, slopes="steep"),
        "'linear' or 'geometric'",
    ),
    "layer_idx": (
        lambda: make(nn.LightningAttention, 2, layer_idx=1, num_layers=1),
        r"`layer_idx` expects a layer counted from 0, below `num_layers` \(1\)",
    ),
    "lower_bound": (lambda: make(nn.HGRN2, 2, lower_bound=1.0), "lower_bound"),
    "HGRN2 heads": (lambda: make(nn.HGRN2), "`num_heads`"),
    "groups": (lambda: make(nn.Mamba2, 4, 3), r"`num_groups` \(3\) has to divide"),
    "window": (lambda: make(nn.SlidingWindowAttention, window=0), "window"),
    "no heads": (lambda: make(num_heads=0), "`num_heads` expects 1 or more"),
    "negative key_size": (lambda: make(key_size=-2), "`key_size` expects 1 or more"),
    "HGRN2 key_size": (lambda: make(nn.HGRN2, 2, key_size=0), "`key_size` expects 1 or more"),
    "HGRN2 half a channel": (lambda: make(nn.HGRN2, key_size=2.5), "`key_size` expects an integer"),
    "negative heads": (lambda: make(nn.Mamba2, -2), "`num_heads` expects 1 or more"),
    "no conv_size": (lambda: make(nn.Mamba2, 4, conv_size=None), "`conv_size` expects an integer"),
    "boundaries of no sequence": (
        lambda: make(nn.SlidingWindowAttention, window=2)(X, cu_seqlens=jnp.array([0])),
        r"`SlidingWindowAttention\(..., cu_seqlens=...\)` expects the boundaries",
    ),
    "no layers": (
        lambda: nn.LanguageModel(lambda i, key: make(), 0, 5, key=KEY),
        "num_layers=...\\)` expects 1 or more",
    ),
    "no mixer": (lambda: nn.LanguageModel(lambda i, key: None, 1, 5, key=KEY), "expects a mixer"),
    "a block": (lambda: nn.Block(nn.Block(make(), key=KEY), key=KEY), "expects a mixer"),
    "one layer": (
        lambda: nn.LanguageModel(make(), 1, 5, key=KEY),
        "expects a function that makes a mixer for each layer, but got a layer, GatedLinearAtt",
    ),
    "no model": (
        lambda: nn.generate(lambda x: x, jnp.arange(3), 5, KEY),
        "expects a layer from tokens to logits",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_mistake(name):
    call, message = CALLS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_dtypes():
    model = nn.LanguageModel(lambda i, key: make(), 1, 5, key=KEY)
    with pytest.raises(TypeError, match="integer dtype"):
        model(jnp.ones((5,)))
    with pytest.raises(TypeError, match="floating dtype"):
        make()(jnp.ones((5, 8), jnp.int32))


@pytest.mark.parametrize("kind", [nn.GatedLinearAttention, nn.SlidingWindowAttention])
def test_values_of_cu_seqlens(kind):
    """Also in a layer that has no recurrence."""
    layer = make(kind, **({} if kind is nn.GatedLinearAttention else {"window": 2}))
    with pytest.raises(Exception, match=rf"`{kind.__name__}\(..., cu_seqlens=...\)` must not"):
        layer(X, cu_seqlens=jnp.array([0, 4, 2]))


def test_values_of_cu_seqlens_are_checked_once():
    """Not in every layer again: it takes a call of the host."""
    model = nn.LanguageModel(lambda i, key: make(), 2, 5, key=KEY)
    run = lambda bounds: model(jnp.arange(4), cu_seqlens=bounds)[0]
    assert str(jax.make_jaxpr(run)(jnp.array([0, 2, 4]))).count("raises") == 1


def test_plain_numbers():
    """Lists and Python numbers are arrays too."""
    model = nn.LanguageModel(lambda i, key: make(), 1, 5, key=KEY)
    _, states = model([1, 2, 3], cu_seqlens=[0, 1, 3])
    assert states[0].position.tolist() == [[1], [2]]
    assert model.step(3)[0].shape == (5,)
