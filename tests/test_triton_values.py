"""The kernels' numbers, in Triton's interpreter, against the float64 scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linrec

from .helpers import Case, check, GATES, PACKING, relative_error


METHOD = linrec.Triton(interpret=True)
# The interpreter takes its time by the token where gates are extreme: smaller chunks, same code.
SMALL = linrec.Triton(linrec.KernelConfig(chunk=16), interpret=True)
ONE = Case("all", B=1, T=70, H=2, Hkv=1)


@pytest.mark.core
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates):
    check(ONE._replace(gates=gates), METHOD)


@pytest.mark.parametrize("T", [1, 15, 63, 100, 257])
@pytest.mark.parametrize("gates", ["g", "gk"])
def test_lengths(gates, T):
    check(Case(gates, B=1, T=T, H=1, Hkv=1), METHOD)


@pytest.mark.parametrize(
    ("gates", "K", "V"),
    [
        ("gk", 16, 30), ("gk", 30, 16), ("gk", 64, 100), ("gk", 100, 64), ("gk", 128, 256),
        ("g", 100, 30), ("g", 256, 128), ("gv", 30, 100), ("gv", 128, 64),
    ],
)  # fmt: skip
def test_sizes(gates, K, V):
    check(Case(gates, B=1, T=65, H=1, Hkv=1, K=K, V=V), METHOD)


@pytest.mark.core
@pytest.mark.parametrize("strength", ["strong", "-20", "-200", "-inf", "-1e4", "growth"])
@pytest.mark.parametrize("gates", ["g", "gk", "gv"])
def test_strengths(gates, strength):
    check(Case(gates, B=1, T=40, H=1, Hkv=1, strength=strength), SMALL)


def test_all_gates_extreme():
    check(Case("all", B=1, T=20, H=1, Hkv=1, strength="-inf"), SMALL)


def test_extreme_gates_in_a_whole_chunk():
    check(Case("gk", B=1, T=70, H=1, Hkv=1, strength="-inf"), METHOD)


@pytest.mark.core
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [16, 64])
def test_packed(reverse, chunk):
    method = linrec.Triton(linrec.KernelConfig(chunk=chunk), interpret=True)
    check(Case("all", T=100, H=1, Hkv=1, packing=PACKING, reverse=reverse), method)


def test_packed_into_nothing():
    check(Case("g_gamma", T=5, H=1, Hkv=1, packing=(0, 0, 0)), METHOD)


@pytest.mark.parametrize("gates", ["none", "g", "gk"])
def test_reverse(gates):
    check(Case(gates, B=1, T=70, H=1, Hkv=1, reverse=True), METHOD)


@pytest.mark.parametrize("Hkv", [1, 4])
def test_grouped_heads(Hkv):
    check(Case("gk-and-g_gamma", B=2, T=20, H=4, Hkv=Hkv), SMALL)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, gates):
    check(Case(gates, B=1, T=130, H=2, Hkv=2, K=64, V=32, dtype=dtype), METHOD)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", [1, 5])
def test_decoding(gates, T):
    """Without a gradient a few tokens take a kernel of their own."""
    case = Case(gates, B=2, T=T, reverse=T == 5)
    arguments = case.arguments()
    wide = {name: x.astype(jnp.float64) for name, x in arguments.items()}
    run = lambda x, method: linrec.recurrent(**x, **case.options(), method=method)
    state = np.array(arguments["initial_state"])
    for a, e in zip(run(arguments, METHOD), run(wide, linrec.Scan()), strict=True):
        assert relative_error(a, e) < 1e-6
    # It works in place, on a copy where the caller keeps the state.
    np.testing.assert_array_equal(state, arguments["initial_state"])


def test_step_and_its_derivatives(monkeypatch):
    """As on a GPU. Its derivatives, forward mode included, are those of its definition."""
    from linrec._method import scan

    given = Case("all", B=2, T=1).arguments()
    rest = ("g_gamma", "initial_state", "softmax_scale")
    token = {name: x if name in rest else x[:, 0] for name, x in given.items()}
    state = token.pop("initial_state")
    run = jax.vmap(lambda q: linrec.step(state, **token | {"query": q}))
    q = jnp.stack([token["query"], -token["query"]])
    expected = jax.jvp(run, (q,), (q,))
    monkeypatch.setattr(scan.Auto, "select", lambda *_: METHOD)
    monkeypatch.setattr(scan, "by_platform", lambda on_gpu, _, inputs: on_gpu(inputs))
    for a, e in zip(
        jax.tree.leaves(jax.jvp(run, (q,), (q,))), jax.tree.leaves(expected), strict=True
    ):
        assert relative_error(a, e) < 1e-6


@pytest.mark.parametrize("chunk", [32, 128])
def test_other_blocks(chunk):
    config = linrec.KernelConfig(chunk=chunk)
    check(ONE._replace(gates="gk", T=140, H=1), linrec.Triton(config, interpret=True))


def test_blocks_are_checked(no_type_checks):
    with pytest.raises(ValueError, match="powers of two"):
        linrec.KernelConfig(chunk=48)
    with pytest.raises(ValueError, match="input_precision"):
        linrec.Triton(input_precision="float32")


def test_float64_is_refused():
    x = jnp.ones((4, 1, 2), jnp.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        linrec.recurrent(x, x, x, method=METHOD)
    assert isinstance(linrec.Auto().select(_inputs(x)), linrec.Chunked)


def _inputs(x):
    from linrec._inputs import canonicalise

    return canonicalise("test", x, x, x, *(None,) * 6, False, None)[0]


def test_gradients_through_eager_calls():
    q = jax.random.normal(jax.random.key(0), (20, 1, 4), jnp.float32)
    loss = lambda q, m: jnp.sum(linrec.recurrent(q, q, q, method=m)[0] ** 2)
    assert relative_error(*(jax.grad(loss)(q, m) for m in (METHOD, linrec.Scan()))) < 1e-5
