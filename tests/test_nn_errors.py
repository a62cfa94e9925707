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
        r"`GatedLinearAttention.step\(x\)` expects `x` of shape \(8\)",
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
    "conv_size": (lambda: make(conv_size=0), "`conv_size` expects"),
    "slopes": (
        lambda: make(nn.LightningAttention, 2, layer_idx=0, num_layers=1, slopes="steep"),
        "'linear' or 'geometric'",
    ),
    "layer_idx": (
        lambda: make(nn.LightningAttention, 2, layer_idx=1, num_layers=1),
        "counted from 0",
    ),
    "lower_bound": (lambda: make(nn.HGRN2, 2, lower_bound=1.0), "lower_bound"),
    "HGRN2 heads": (lambda: make(nn.HGRN2), "`num_heads`"),
    "groups": (lambda: make(nn.Mamba2, 4, 3), r"`num_groups` \(3\) has to divide"),
    "window": (lambda: make(nn.SlidingWindowAttention, window=0), "window"),
    "no layers": (
        lambda: nn.LanguageModel(lambda i, key: make(), 0, 5, key=KEY),
        "1 layer or more",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_mistake(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_dtypes():
    model = nn.LanguageModel(lambda i, key: make(), 1, 5, key=KEY)
    with pytest.raises(TypeError, match="integer dtype"):
        model(jnp.ones((5,)))
    with pytest.raises(TypeError, match="floating dtype"):
        make()(jnp.ones((5, 8), jnp.int32))
