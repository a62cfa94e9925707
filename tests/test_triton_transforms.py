"""What `test_transforms.py`, which has the kernels in its list of methods, leaves out."""

from functools import partial

import jax
import jax.numpy as jnp

import linrec

from .helpers import Case, relative_error


METHOD = linrec.Triton(linrec.KernelConfig(chunk=16), interpret=True)
CASE = Case("gk-and-g_gamma", B=1, T=23, H=2, Hkv=1, K=4, V=3)
NAMES = tuple(CASE.arguments())


def loss(method, *arguments, cu_seqlens=None):
    arguments = dict(zip(NAMES, arguments, strict=True))
    o, state = linrec.recurrent(**arguments, cu_seqlens=cu_seqlens, method=method)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))


def gradient(method, **options):
    return jax.grad(partial(loss, method, **options), tuple(range(len(NAMES))))


def arguments(case=CASE):
    return tuple(case.arguments().values())


def stacked(case=CASE, number=2):
    rows = [arguments(case._replace(seed=seed)) for seed in range(number)]
    return tuple(jnp.stack(x) for x in zip(*rows, strict=True))


def assert_same(transformed):
    actual, expected = transformed(METHOD), transformed(linrec.Scan())
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, e) < 1e-5


def test_grad_of_vmap_of_some():
    mapped = ("query", "g_gamma")
    given = [a if n in mapped else b for n, a, b in zip(NAMES, stacked(), arguments(), strict=True)]
    axes = [0 if name in mapped else None for name in NAMES]

    def transformed(m):
        total = lambda *x: jnp.sum(jax.vmap(partial(loss, m), axes)(*x))
        return jax.jit(jax.grad(total, tuple(range(len(NAMES)))))(*given)

    assert_same(transformed)


def test_vmap_of_packings():
    """Every row has boundaries of its own: still one launch."""
    case = CASE._replace(packing=(0, 10, 10, 18))
    packings = jnp.array([[0, 10, 10, 18], [0, 0, 20, 20]])

    def transformed(m):
        f = lambda cu_seqlens, *x: gradient(m, cu_seqlens=cu_seqlens)(*x)
        return jax.jit(jax.vmap(f))(packings, *stacked(case))

    assert_same(transformed)


def test_second_order():
    """In XLA: kernels have a first derivative only."""
    q, k, v = arguments()[:3]
    cu_seqlens = jnp.array((0, 10, 10, 18))

    def transformed(m):
        def size_of_gradient(q):
            f = lambda q: linrec.recurrent(q, k, v, cu_seqlens=cu_seqlens, method=m)[0]
            return jnp.sum(jax.grad(lambda q: jnp.sum(jnp.sin(f(q))))(q) ** 2)

        return jax.jit(jax.grad(size_of_gradient))(q)

    assert_same(transformed)
