"""Values, states and gradients of every method against the float64 scan."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st

import linrec

from .helpers import (
    Case,
    check,
    compare,
    GATES,
    METHODS,
    PACKING,
    relative_error,
)


LAYOUTS = {
    "dense": {},
    "dense-reverse-zero-state": {"reverse": True, "with_state": False},
    "packed": {"packing": PACKING},
    "packed-reverse-unbatched": {"packing": PACKING, "reverse": True, "batched": False},
}


@pytest.mark.parametrize("layout", ["dense", "packed-reverse-unbatched"])
@pytest.mark.parametrize("gates", [gates for gates in GATES if gates != "all"])
def test_gates(gates, layout):
    check(Case(gates, **LAYOUTS[layout]), METHODS["chunked-16"])


@pytest.mark.parametrize("layout", ["dense-reverse-zero-state", "packed"])
def test_layouts(layout):
    check(Case("all", **LAYOUTS[layout]), METHODS["chunked-16"])


@pytest.mark.core
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["dense", "packed-reverse-unbatched"])
def test_methods(method, layout):
    check(Case("all", **LAYOUTS[layout]), METHODS[method])


@pytest.mark.parametrize("gates", ["g", "g_gamma", "gk", "all"])
def test_extreme_gates(gates):
    for strength in ("strong", "-20", "-200", "-inf", "-1e4", "zero"):
        check(Case(gates, strength=strength, B=1), METHODS["auto"])


@pytest.mark.parametrize("gates", ["g", "g_gamma", "gk", "gv"])
def test_growing_state(gates):
    check(Case(gates, strength="0.5", B=1, T=40), METHODS["auto"])


@pytest.mark.parametrize("method", METHODS)
def test_growth_that_decay_undoes(method):
    """Factors of either gate alone would be infinite, their sums would have no digits left."""
    case = Case(B=1, T=40, H=1, Hkv=1, with_state=False)
    shapes = {"g": (1, 40, 1), "gk": (1, 40, 1, case.K), "gv": (1, 40, 1, case.V)}
    strength = jax.random.uniform(jax.random.key(0), (1, 40, 1), jnp.float32, 100, 200)
    for growth, decay in [("g", "gk"), ("gk", "gv"), ("gv", "g")]:
        if method == "triton" and "gv" in (growth, decay):
            continue  # the kernels keep the factors of keys and of values apart
        arguments = case.arguments()
        for gate, sign in ((growth, 1), (decay, -1)):
            of_tokens = sign * (strength if gate == "g" else strength[..., None])
            arguments[gate] = jnp.broadcast_to(of_tokens, shapes[gate])
        compare(arguments, METHODS[method])


def test_channels_that_grow_in_turns():
    """What a token's channels have in common adds up to more than `exp` can take."""
    arguments = Case("gv", strength="zero", B=1, T=64, H=1, Hkv=1, with_state=False).arguments()
    t, channel = jnp.arange(64)[:, None], jnp.arange(6)[None]
    gk = jnp.where((t + channel) % 2 == 0, 10.0, -10.0).astype(jnp.float32)
    compare(arguments | {"gk": gk[None, :, None]}, METHODS["auto"])


@pytest.mark.parametrize("gates", ["gk", "gv", "all"])
def test_strong_gates_of_few_tokens(gates):
    """They sum up to little, but the gradient of each is small beside what cancels in it."""
    for T, strength in ((1, "-20"), (3, "-10"), (6, "-3"), (40, "-3")):
        check(Case(gates, strength=strength, B=1, T=T), METHODS["auto"])


@pytest.mark.parametrize("gates", ["gk", "gv"])
def test_gates_just_weak_enough_to_factorise(gates):
    """Their gradients have lost the digits of one decay: how many are left depends on luck."""
    for T, seed, strength in itertools.product((2, 8), range(12), (1.95, 2.95)):
        case = Case("none", B=1, T=T, H=2, Hkv=2, K=4, V=4, with_state=False, seed=seed)
        arguments = case.arguments()
        arguments[gates] = jnp.full_like(arguments["query"], -strength)
        del arguments["softmax_scale"]  # whose gradient is a sum that cancels at times
        compare(arguments, METHODS["auto"])


def test_small_losses():
    """Decays of keys and of values, multiplied, must not take gradients out of float32's range."""
    x = jax.random.normal(jax.random.key(0), (128, 1, 4), jnp.float32)
    gates = (jnp.full(x.shape, -0.49, jnp.float32),) * 2

    def loss(gates, weight):
        o, _ = linrec.recurrent(x, x, x, gk=gates[0], gv=gates[1], method=linrec.Chunked())
        return weight * jnp.sum(jnp.sin(o))

    gradient = jax.jit(jax.grad(loss))
    small, large = gradient(gates, jnp.float32(2.0**-40)), gradient(gates, jnp.float32(1))
    for actual, expected in zip(small, large, strict=True):
        assert relative_error(actual * 2.0**40, expected) < 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_first_token_decays_nothing(method):
    q = jax.random.normal(jax.random.key(0), (1, 2, 5), jnp.float32)
    run = functools.partial(linrec.recurrent, q, q, q, method=METHODS[method])
    loss = lambda gk, gv: sum(jnp.sum(jnp.sin(x)) for x in run(gk=gk, gv=gv))
    for gradient in jax.grad(loss, (0, 1))(-q / 16, -q / 16):
        assert not gradient.any()


@pytest.mark.parametrize("T", [1, 2, 15, 63, 64, 65, 130, 1000])
def test_lengths(T):
    check(Case("gk", B=1, T=T, H=1, Hkv=1, K=3, V=7), METHODS["auto"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.parametrize("gates", ["none", "all"])
def test_dtypes(dtype, gates):
    check(Case(gates, dtype=dtype, K=16, V=16), METHODS["chunked-16"])


@pytest.mark.parametrize("gates", [gates for gates in GATES if gates != "gk-and-g_gamma"])
def test_error_does_not_grow_with_length(gates):
    check(Case(gates, B=1, T=65_536, H=1, Hkv=1, K=4, V=4), METHODS["auto"])


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens(method):
    state = jnp.ones((2, 4, 6, 5), jnp.float32)
    q = k = jnp.zeros((2, 0, 4, 6), jnp.float32)
    v = jnp.zeros((2, 0, 4, 5), jnp.float32)
    o, final = linrec.recurrent(q, k, v, gk=k, initial_state=state, method=METHODS[method])
    assert o.shape == (2, 0, 4, 5)
    assert jnp.array_equal(final, state)


@pytest.mark.parametrize("method", METHODS)
def test_all_sequences_empty(method):
    state = jnp.ones((2, 1, 4, 4), jnp.float32)
    q = jnp.ones((7, 1, 4), jnp.float32)
    cu_seqlens = jnp.array([0, 0, 0])
    o, final = linrec.recurrent(
        q, q, q, initial_state=state, cu_seqlens=cu_seqlens, method=METHODS[method]
    )
    assert jnp.array_equal(o, jnp.zeros_like(o))
    assert jnp.array_equal(final, state)


@pytest.mark.parametrize("method", METHODS)
def test_padding_may_hold_anything(method):
    """Also NaN: neither outputs nor gradients of real tokens may see it."""
    arguments = Case("all", packing=(0, 20, 40), T=50).arguments()
    cu_seqlens = jnp.array([0, 20, 40])
    spoil = ("query", "key", "value", "g", "gk", "gv")

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(arguments):
        o, state = linrec.recurrent(**arguments, cu_seqlens=cu_seqlens, method=METHODS[method])
        return jnp.sum(o) + jnp.sum(state), (o, state)

    spoilt = {n: x.at[:, 40:].set(jnp.nan) if n in spoil else x for n, x in arguments.items()}
    gradients, (o, state) = gradient(spoilt)
    clean_gradients, (clean_o, clean_state) = gradient(arguments)
    assert jnp.array_equal(o, clean_o)
    assert jnp.array_equal(o[:, 40:], jnp.zeros_like(o[:, 40:]))
    assert jnp.array_equal(state, clean_state)
    for name in arguments:
        assert jnp.array_equal(gradients[name], clean_gradients[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_state_passing(method):
    """A sequence cut anywhere, with the state carried, is the sequence whole."""
    case = Case("all")
    arguments = case.arguments()
    tokens = ("query", "key", "value", "g", "gk", "gv")
    part = lambda s: {n: x[:, s] if n in tokens else x for n, x in arguments.items()}
    run = jax.jit(lambda x: linrec.recurrent(**x, method=METHODS[method]))
    whole, final = run(arguments)
    for cut in (1, 33):
        first, state = run(part(slice(cut)))
        second, state = run(part(slice(cut, None)) | {"initial_state": state})
        assert relative_error(jnp.concatenate([first, second], 1), whole) < 1e-6
        assert relative_error(state, final) < 1e-6


def test_packed_is_separate():
    case = Case("all", packing=PACKING)
    arguments = case.arguments()
    o, final = linrec.recurrent(**arguments, **case.options())
    tokens = ("query", "key", "value", "g", "gk", "gv")
    for n, (begin, end) in enumerate(itertools.pairwise(PACKING)):
        alone = {name: x[:, begin:end] if name in tokens else x for name, x in arguments.items()}
        alone |= {name: arguments[name][n : n + 1] for name in ("g_gamma", "initial_state")}
        o_n, final_n = linrec.recurrent(**alone)
        assert relative_error(o[:, begin:end], o_n) < 1e-6
        assert relative_error(final[n], final_n[0]) < 1e-6


@settings(max_examples=3, deadline=None)
@given(
    gates=st.sampled_from(sorted(GATES)),
    strength=st.sampled_from(["ordinary", "strong", "-3", "-inf"]),
    T=st.integers(1, 70),
    groups=st.integers(1, 3),
    K=st.integers(1, 9),
    V=st.integers(1, 9),
    reverse=st.booleans(),
    block=st.sampled_from([1, 4, 32]),
    seed=st.integers(0, 2**16),
)
def test_any_problem(gates, strength, T, groups, K, V, reverse, block, seed):
    case = Case(
        gates,
        strength=strength,
        B=1,
        T=T,
        H=2 * groups,
        Hkv=2,
        K=K,
        V=V,
        reverse=reverse,
        seed=seed,
    )
    check(case, linrec.Chunked(block))


def test_without_x64():
    with jax.enable_x64(False):
        q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 50, 2, 4))
        cu_seqlens = jnp.array([0, 20, 50])
        run = lambda method: linrec.recurrent(q, k, v, cu_seqlens=cu_seqlens, method=method)
        for method in METHODS.values():
            for actual, expected in zip(run(method), run(linrec.Scan()), strict=True):
                assert actual.dtype == jnp.float32
                assert relative_error(actual, expected) < 1e-6
