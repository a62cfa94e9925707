"""One token at a time, and the thin wrappers."""

import jax
import jax.numpy as jnp
import pytest

import linrec

from .helpers import Case, count_compilations, GATES, relative_error


pytestmark = pytest.mark.core

TOKENS = ("query", "key", "value", "g", "gk", "gv")


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("gates", GATES)
def test_scanned_step_is_recurrent(gates, batched):
    case = Case(gates, T=20, batched=batched)
    arguments = case.arguments()
    o, final_state = linrec.recurrent(**arguments)
    axis = 1 if batched else 0
    tokens = {n: jnp.moveaxis(x, axis, 0) for n, x in arguments.items() if n in TOKENS}
    rest = {n: x for n, x in arguments.items() if n in ("g_gamma", "softmax_scale")}

    def body(state, token):
        o, state = linrec.step(state, **token, **rest)
        return state, o

    state, outputs = jax.lax.scan(body, arguments["initial_state"], tokens)
    assert relative_error(jnp.moveaxis(outputs, 0, axis), o) < 1e-6
    assert relative_error(state, final_state) < 1e-6


def test_step_keeps_dtypes():
    q = jnp.ones((4, 8), jnp.bfloat16)
    o, state = linrec.step(jnp.zeros((4, 8, 8), jnp.float32), q, q, q)
    assert o.dtype == jnp.bfloat16
    assert state.dtype == jnp.float32


def test_recurrent_gla():
    arguments = Case("g-per-key").arguments()
    expected = linrec.recurrent(**arguments)
    named = ("query", "key", "value", "g")
    rest = {name: x for name, x in arguments.items() if name not in named}
    actual = linrec.recurrent_gla(*(arguments[name] for name in named), **rest)
    for a, e in zip(actual, expected, strict=True):
        assert jnp.array_equal(a, e)


def test_without_jit_it_compiles_once():
    arguments = Case("gk", T=1).arguments()
    token = {n: x[:, 0] for n, x in arguments.items() if n in TOKENS}
    B, H, K = token["query"].shape
    state = jnp.zeros((B, H, K, token["value"].shape[-1]))
    call = lambda: linrec.step(state, **token)
    call()
    with count_compilations() as compilations:
        call()
    assert compilations == []


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
@pytest.mark.parametrize("layer", [0, 3])
def test_lightning_attn(layer, dtype, tolerance):
    arguments = Case("none", H=4, dtype=dtype).arguments()
    slopes = jnp.array([-(8 / 4) * (1 - layer / 6) * h for h in range(4)])
    expected = linrec.recurrent(**arguments, g_gamma=slopes)
    actual = linrec.lightning_attn(
        arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), layer, 6, **arguments
    )
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < tolerance
