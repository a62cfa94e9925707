"""The kernels' numbers, in Triton's interpreter, against the float64 scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linrec
from linrec._triton.config import Pairs, Walk

from .helpers import Case, check, GATES, PACKING, relative_error


METHOD = linrec.Triton(interpret=True)
# Smaller chunks, same code: the interpreter takes its time by the token and by the block.
SMALL = linrec.Triton(linrec.KernelConfig(chunk=16), interpret=True)
WIDE = linrec.Triton(
    linrec.KernelConfig(
        16, Walk(64, 64), Pairs(64, 64), d_key=Pairs(64, 64), d_value=Pairs(64, 64)
    ),
    interpret=True,
)
ONE = Case("all", B=1, T=70, H=2, Hkv=1)


@pytest.mark.core
@pytest.mark.parametrize("gates", GATES)
def test_gates(gates):
    check(ONE._replace(gates=gates), METHOD)


@pytest.mark.core
@pytest.mark.parametrize(
    ("gates", "strength"),
    [
        ("gk", "strong"), ("gk", "-20"), ("gk", "-200"), ("gk", "-inf"), ("gk", "-1e4"),
        ("gv", "strong"), ("gv", "-inf"), ("all", "-20"), ("g", "-200"), ("g", "-inf"),
    ],
)  # fmt: skip
def test_strengths(gates, strength):
    """A chunk of 64 tokens, which is cut into pieces, and one of a few tokens."""
    check(Case(gates, B=1, T=70, H=1, Hkv=1, strength=strength), METHOD)


@pytest.mark.parametrize(
    ("gates", "strength"),
    [
        ("g", "-20"), ("gv", "-200"), ("all", "-200"), ("all", "-inf"), ("all", "zero"),
        ("g", "zero"), ("gk", "zero"),
        ("g", "0.5"), ("gk", "0.5"), ("gv", "0.5"), ("all", "0.5"),
    ],
)  # fmt: skip
def test_strengths_in_small_chunks(gates, strength):
    check(Case(gates, B=1, T=20, H=1, Hkv=1, K=3, V=2, strength=strength), SMALL)


@pytest.mark.parametrize(
    ("gates", "T", "strength"),
    [("gk", 2, "-6"), ("gk", 5, "-6"), ("gv", 5, "-6"), ("all", 2, "-6")],
)
def test_strong_gates_of_few_tokens(gates, T, strength):
    """Ordinary by their sum, and so strong that what only cancels on paper would drown the rest."""
    check(Case(gates, B=1, T=T, H=1, Hkv=1, strength=strength), SMALL)


@pytest.mark.parametrize("seed", range(6))
def test_one_token(seed):
    """Seed 5: the terms of the scalar gate's gradient nearly cancel."""
    check(Case("all", B=1, T=1, H=1, Hkv=1, seed=seed), SMALL)


@pytest.mark.parametrize(("gates", "T"), [("g", 63), *(("gk", T) for T in (1, 15, 63, 100, 257))])
def test_lengths(gates, T):
    check(Case(gates, B=1, T=T, H=1, Hkv=1), METHOD)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gates", ["g", "g_gamma"])
def test_lengths_packed(gates, seed):
    packing = (0, 1, 16, 79, 179, 436)
    check(Case(gates, T=440, H=1, Hkv=1, K=2, V=2, packing=packing, seed=seed), METHOD)


@pytest.mark.parametrize(
    ("gates", "K", "V"),
    [
        ("gk", 16, 30), ("gk", 30, 128), ("gk", 64, 100), ("gk", 100, 16), ("gk", 128, 256),
        ("g", 256, 64), ("gv", 64, 256), ("gv", 1, 3), ("all", 100, 1),
    ],
)  # fmt: skip
def test_sizes(gates, K, V):
    check(Case(gates, B=1, T=20, H=1, Hkv=1, K=K, V=V), WIDE)


@pytest.mark.parametrize("gates", ["g", "gk"])
def test_sizes_in_default_blocks(gates):
    check(Case(gates, B=1, T=65, H=1, Hkv=1, K=100, V=30), METHOD)


@pytest.mark.core
@pytest.mark.parametrize(("reverse", "chunk"), [(False, 16), (True, 64)])
def test_packed(reverse, chunk):
    method = linrec.Triton(linrec.KernelConfig(chunk=chunk), interpret=True)
    check(Case("all", T=100, H=1, Hkv=1, packing=PACKING, reverse=reverse), method)


def test_packed_into_nothing():
    check(Case("g_gamma", T=5, H=1, Hkv=1, packing=(0, 0, 0)), METHOD)


@pytest.mark.parametrize("gates", ["none", "g"])
def test_reverse(gates):
    check(ONE._replace(gates=gates, reverse=True), METHOD)


@pytest.mark.core
def test_everything_together():
    """Grouped heads, every gate with resets, packed, reversed."""
    case = Case("all", T=22, H=6, Hkv=2, K=3, V=2, packing=(0, 0, 18, 19, 21))
    check(case._replace(strength="-inf", reverse=True), SMALL)


@pytest.mark.parametrize("Hkv", [1, 4])
def test_grouped_heads(Hkv):
    check(Case("gk-and-g_gamma", B=2, T=20, H=4, Hkv=Hkv), SMALL)


@pytest.mark.parametrize(
    ("dtype", "gates"),
    [("bfloat16", gates) for gates in GATES] + [("float16", gates) for gates in ("g", "all")],
)
def test_half_precision(dtype, gates):
    check(Case(gates, B=1, T=70, H=2, Hkv=2, K=64, V=32, dtype=dtype), METHOD)


@pytest.mark.parametrize("gates", ["gk", "gv"])
def test_half_precision_of_strong_gates(gates):
    case = Case(gates, B=1, T=70, H=2, Hkv=2, K=64, V=32, dtype="bfloat16")
    check(case._replace(strength="strong"), METHOD)


@pytest.mark.parametrize(
    ("T", "gates"), [(5, gates) for gates in GATES] + [(1, "none"), (1, "all")]
)
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

    return canonicalise("test", x, x, x)[0]


def test_gradients_through_eager_calls():
    q = jax.random.normal(jax.random.key(0), (20, 1, 4), jnp.float32)
    loss = lambda q, m: jnp.sum(linrec.recurrent(q, q, q, method=m)[0] ** 2)
    assert relative_error(*(jax.grad(loss)(q, m) for m in (METHOD, linrec.Scan()))) < 1e-5
