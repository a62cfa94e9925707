"""How a method behaves under `jax.vmap` and under differentiation."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def fold_vmap(function, differentiable=None):
    """Makes `jax.vmap` of `function` one call with a larger batch.

    `function(rows, shared)` takes and returns pytrees of arrays; all but those in `shared` have the
    batch axis first. A plain `vmap` would turn a branch that is taken or left at run time into one
    that is always taken. Where `shared` itself is mapped over, the calls run one after the other.

    The result can be differentiated in reverse, again and again; where `function` itself cannot,
    `differentiable` is the same function in a form that can.
    """

    @jax.custom_batching.custom_vmap
    def call(rows, shared):
        return function(rows, shared)

    @call.def_vmap
    def rule(size, is_mapped, rows, shared):
        rows = jax.tree.map(
            lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape)),
            rows,
            is_mapped[0],
        )
        if any(jax.tree.leaves(is_mapped[1])):
            shared = jax.tree.map(
                lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape)),
                shared,
                is_mapped[1],
            )
            out = jax.lax.map(lambda x: call(*x), (rows, shared))
        else:
            out = call(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), shared)
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_vjp
    def call_with_vjp(rows, shared):
        return call(rows, shared)

    def forward(rows, shared):
        return call(rows, shared), (rows, shared)

    def backward(residuals, cotangents):
        rows, shared = residuals

        def pull_back(rows_and_cotangents, shared):
            rows, cotangents = rows_and_cotangents
            forward = lambda rows: (differentiable or function)(rows, shared)
            return jax.vjp(forward, rows)[1](cotangents)[0]

        return fold_vmap(pull_back)((rows, cotangents), shared), None

    call_with_vjp.defvjp(forward, backward)
    return call_with_vjp


def reverse_mode_only(tree, message: str):
    """Returns `tree`, the tangents of whose floats may be transposed but not computed.

    `jax.custom_vjp` has no forward mode either, and says so in words about itself. `message` is for
    the user.
    """
    floats, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(partial(_reverse_mode_only, message), floats), rest)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reverse_mode_only(message, x):
    return x


@_reverse_mode_only.defjvp
def _reverse_mode_only_jvp(message, primals, tangents):
    (x,), (t,) = primals, tangents
    return x, _tangent_p.bind(t, message=message)


def _refuse(*_, message):
    raise NotImplementedError(message)


_tangent_p = Primitive("linrec_tangent")
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda t, *, message: t)
ad.deflinear2(_tangent_p, lambda ct, _, *, message: [ct])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _refuse)
