"""What `test_transforms.py`, which has the kernels in its list of methods, leaves out."""

from functools import partial

import jax
import jax.numpy as jnp

import linrec

from .helpers import Case
from .test_transforms import arguments, assert_same, gradient, loss, NAMES, stacked


CASE = Case("gk-and-g_gamma", B=1, T=23, H=2, Hkv=1, K=4, V=3)


def test_grad_of_vmap_of_some():
    mapped, all_rows, one = ("query", "g_gamma"), stacked(CASE, 2), arguments(CASE)
    given = [a if n in mapped else b for n, a, b in zip(NAMES, all_rows, one, strict=True)]
    axes = [0 if name in mapped else None for name in NAMES]

    def transformed(m):
        total = lambda *x: jnp.sum(jax.vmap(partial(loss, m), axes)(*x))
        return jax.jit(jax.grad(total, tuple(range(len(NAMES)))))(*given)

    assert_same(transformed, "triton")


def test_vmap_of_packings():
    """Every row has boundaries of its own: still one launch."""
    case = CASE._replace(packing=(0, 10, 10, 18))
    packings = jnp.array([[0, 10, 10, 18], [0, 0, 20, 20]])

    def transformed(m):
        f = lambda cu_seqlens, *x: gradient(m, cu_seqlens=cu_seqlens)(*x)
        return jax.jit(jax.vmap(f))(packings, *stacked(case, 2))

    assert_same(transformed, "triton")


def test_second_order():
    """In XLA: kernels have a first derivative only."""
    q, k, v = arguments(CASE)[:3]
    cu_seqlens = jnp.array((0, 10, 10, 18))

    def transformed(m):
        def size_of_gradient(q):
            f = lambda q: linrec.recurrent(q, k, v, cu_seqlens=cu_seqlens, method=m)[0]
            return jnp.sum(jax.grad(lambda q: jnp.sum(jnp.sin(f(q))))(q) ** 2)

        return jax.jit(jax.grad(size_of_gradient))(q)

    assert_same(transformed, "triton")
