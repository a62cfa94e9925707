"""`vmap`, `grad`, `checkpoint`, `shard_map`, `export` and their nestings."""

import os
import subprocess
import sys
import textwrap
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linrec

from .helpers import Case, count_compilations, METHODS, relative_error


FAST_METHODS = [name for name in METHODS if name not in ("scan", "auto")]
CASE = Case("gk-and-g_gamma", B=2, T=37, H=2, Hkv=1, K=4, V=3)
NAMES = tuple(CASE.arguments())


def loss(method, *arguments, cu_seqlens=None):
    arguments = dict(zip(NAMES, arguments, strict=True))
    o, state = linrec.recurrent(**arguments, cu_seqlens=cu_seqlens, method=method)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))


def arguments(case=CASE):
    return tuple(case.arguments().values())


def gradient(method, **options):
    return jax.grad(partial(loss, method, **options), tuple(range(len(NAMES))))


def assert_same(transformed, method, tolerance=1e-5):
    """`transformed(method)` is a function's result: the same for `method` as for the scan."""
    actual, expected = transformed(METHODS[method]), transformed(linrec.Scan())
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < tolerance


def stacked(case=CASE, number=3):
    rows = [arguments(case._replace(seed=seed)) for seed in range(number)]
    return tuple(jnp.stack(x) for x in zip(*rows, strict=True))


@pytest.mark.core
@pytest.mark.parametrize("method", FAST_METHODS)
def test_vmap_of_grad(method):
    assert_same(lambda m: jax.jit(jax.vmap(gradient(m)))(*stacked()), method)


@pytest.mark.parametrize("mapped", [("query", "g_gamma"), ("gk", "softmax_scale")])
def test_grad_of_vmap_of_some(mapped):
    all_rows, one = stacked(), arguments()
    given = [a if n in mapped else b for n, a, b in zip(NAMES, all_rows, one, strict=True)]
    axes = [0 if name in mapped else None for name in NAMES]

    def transformed(m):
        total = lambda *x: jnp.sum(jax.vmap(partial(loss, m), axes)(*x))
        return jax.jit(jax.grad(total, tuple(range(len(NAMES)))))(*given)

    assert_same(transformed, "chunked-16")


def test_nested_vmap():
    rows = tuple(jnp.stack([x, x[::-1]]) for x in stacked())
    assert_same(lambda m: jax.jit(jax.vmap(jax.vmap(gradient(m))))(*rows), "chunked-16")


@pytest.mark.parametrize("method", FAST_METHODS)
def test_vmap_of_nothing(method):
    none = [x[:0] for x in stacked()]
    for gradient_of, x in zip(jax.vmap(gradient(METHODS[method]))(*none), none, strict=True):
        assert gradient_of.shape == x.shape
        assert gradient_of.dtype == x.dtype


def test_vmap_of_packings():
    case = CASE._replace(packing=(0, 10, 10, 30))
    packings = jnp.array([[0, 10, 10, 30], [0, 0, 37, 37], [0, 1, 2, 3]])

    def transformed(m):
        f = lambda cu_seqlens, *x: gradient(m, cu_seqlens=cu_seqlens)(*x)
        return jax.jit(jax.vmap(f))(packings, *stacked(case))

    assert_same(transformed, "chunked-16")


@pytest.mark.core
@pytest.mark.parametrize("method", METHODS)
def test_without_jit_it_compiles_once(method):
    method, case = METHODS[method], CASE._replace(T=3)
    calls = (partial(loss, method), gradient(method), jax.vmap(gradient(method)))
    given = (arguments(case), arguments(case), stacked(case))
    for call, x in zip(calls, given, strict=True):
        call(*x)
    with count_compilations() as compilations:
        for call, x in zip(calls, given, strict=True):
            call(*x)
    assert compilations == []


@pytest.mark.parametrize("method", FAST_METHODS)
def test_no_tracer_is_kept(method):
    with jax.checking_leaks():
        jax.jit(gradient(METHODS[method])).lower(*arguments(CASE._replace(T=5)))


def test_vmap_keeps_the_branch():
    """A batched predicate would become a select, and every chunk would pay for extreme gates."""
    f = lambda q, gk: linrec.recurrent(q, q, q, gk=gk, method=linrec.Chunked())[0]
    q = jnp.ones((3, 64, 2, 4))
    text = jax.jit(jax.vmap(f)).lower(q, -q).as_text()
    assert "stablehlo.case" in text


@pytest.mark.core
@pytest.mark.parametrize("method", FAST_METHODS)
def test_checkpoint(method):
    def transformed(m):
        f = jax.checkpoint(partial(loss, m))
        return jax.jit(jax.grad(f, tuple(range(len(NAMES)))))(*arguments())

    assert_same(transformed, method)


@pytest.mark.parametrize(
    ("method", "packing"),
    [("chunked-16", (0, 4, 4, 9)), ("segmented", None)],
)
def test_second_order(method, packing):
    cu_seqlens = None if packing is None else jnp.array(packing)
    given = arguments(CASE._replace(packing=packing, T=12))

    def transformed(m):
        def size_of_gradient(*x):
            return sum(jnp.sum(y**2) for y in gradient(m, cu_seqlens=cu_seqlens)(*x))

        return jax.jit(jax.grad(size_of_gradient, tuple(range(len(NAMES)))))(*given)

    assert_same(transformed, method)


def test_third_order():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((30, 1, 2)), jnp.float32)

    def transformed(m):
        f = lambda s: jnp.sum(linrec.recurrent(x * s, x, x, method=m)[0] ** 2)
        return jax.jit(jax.grad(jax.grad(jax.grad(f))))(jnp.float32(0.1))

    assert_same(transformed, "chunked-16")


def test_forward_mode_of_scan():
    """Along a direction, the derivative is the gradient times the direction."""
    f = partial(loss, linrec.Scan())
    given = [x.astype(jnp.float64) for x in arguments()]
    direction = [x.astype(jnp.float64) for x in arguments(CASE._replace(seed=5))]
    _, along = jax.jvp(f, given, direction)
    gradients = gradient(linrec.Scan())(*given)
    expected = sum(jnp.vdot(x, y) for x, y in zip(gradients, direction, strict=True))
    assert relative_error(along, expected) < 1e-12


@pytest.mark.core
@pytest.mark.parametrize("how", ["plain", "of jit", "in jit", "jacfwd", "of grad"])
@pytest.mark.parametrize("method", FAST_METHODS)
def test_forward_mode_says_which_method_has_it(method, how):
    q = arguments()[0]
    f = lambda x: linrec.recurrent(q, q, x, method=METHODS[method])[0]
    x = jnp.ones_like(q)
    run = {
        "plain": lambda: jax.jvp(f, (x,), (x,)),
        "of jit": lambda: jax.jvp(jax.jit(f), (x,), (x,)),
        "in jit": lambda: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        "jacfwd": lambda: jax.jacfwd(f)(x),
        "of grad": lambda: jax.jvp(jax.grad(lambda x: jnp.sum(f(x))), (x,), (x,)),
    }
    with pytest.raises(NotImplementedError, match=r"linrec\.Scan"):
        run[how]()


@pytest.mark.core
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("method", FAST_METHODS)
def test_shard_map(method, check_vma):
    """Gradients of arguments that the shards share are summed over them."""
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = ("query", "key", "value", "g", "gk", "gv", "initial_state")
    specs = tuple(P("x") if name in split else P() for name in NAMES)
    given = [x[0] if name == "g_gamma" else x for name, x in CASE.arguments().items()]

    def transformed(m):
        f = lambda *x: jax.lax.psum(loss(m, *x), "x")
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        return jax.jit(jax.grad(f, tuple(range(len(NAMES)))))(*given)

    assert_same(transformed, method)


def test_export():
    exported = jax.export.export(jax.jit(gradient(linrec.Auto())))(*arguments())
    again = jax.export.deserialize(exported.serialize())
    expected = gradient(linrec.Scan())(*arguments())
    for a, e in zip(again.call(*arguments()), expected, strict=True):
        assert relative_error(a, e) < 1e-5


@pytest.mark.usefixtures("no_type_checks")  # they know numbers only
def test_export_of_any_batch():
    def loss(q, g_gamma):
        o, _ = linrec.recurrent(q, q, q, g_gamma=g_gamma, gk=-q)
        return jnp.sum(o**2)

    f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    (batch,) = jax.export.symbolic_shape("batch")
    q = jax.random.uniform(jax.random.key(0), (3, 20, 2, 5), jnp.float32)
    g_gamma = jnp.array([-0.1, -0.3], jnp.float32)
    exported = jax.export.export(f)(jax.ShapeDtypeStruct((batch, *q.shape[1:]), q.dtype), g_gamma)
    actual, expected = exported.call(q, g_gamma), f(q, g_gamma)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(x, y) < 1e-6


def test_export_of_packed():
    """The check of boundaries that are traced is a host callback: it is switched off to export."""
    program = """
        import jax, jax.numpy as jnp, linrec
        q, cu_seqlens = jnp.ones((9, 2, 4)), jnp.array([0, 4, 9])
        f = jax.jit(lambda q, cu_seqlens: linrec.recurrent(q, q, q, cu_seqlens=cu_seqlens))
        again = jax.export.deserialize(jax.export.export(f)(q, cu_seqlens).serialize())
        o, _ = again.call(q, jnp.array([0, 2, 9]))
        assert jnp.array_equal(o, f(q, jnp.array([0, 2, 9]))[0])
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        env=os.environ | {"EQX_ON_ERROR": "off"},
    )


@pytest.mark.parametrize("method", METHODS)
def test_one_compilation_for_every_packing(method):
    q = jnp.ones((50, 2, 4), jnp.float32)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def f(q, cu_seqlens):
        return linrec.recurrent(q, q, q, cu_seqlens=cu_seqlens, method=METHODS[method])

    for packing in ([0, 10, 20, 50], [0, 0, 0, 50], [0, 50, 50, 50], [0, 1, 2, 3]):
        f(q, jnp.array(packing))
    assert f._cache_size() == 1


def test_numpy_and_eager():
    q = np.ones((5, 2, 4), np.float32)
    o, _ = linrec.recurrent(q, q, q, g=np.zeros((5, 2), np.float32), softmax_scale=1)
    np.testing.assert_allclose(o[:, 0, 0], 4.0 * np.arange(1, 6), rtol=1e-6)
