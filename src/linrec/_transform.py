"""How a method behaves under `jax.vmap`, under differentiation and on several devices."""

import itertools
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec


def fold_vmap(function, differentiable=None):
    """Makes `jax.vmap` of `function` one call with a larger batch.

    `function(rows, shared)` takes and returns pytrees of arrays; all but those in `shared` have the
    batch axis first. A plain `vmap` would turn a branch that is taken or left at run time into one
    that is always taken. Where `shared` itself is mapped over, the calls run one after the other.
    Rows and heads that are sharded stay where they are, see `_by_device`.

    The result can be differentiated in reverse, again and again; where `function` itself cannot,
    `differentiable` is the same function in a form that can.
    """

    call = jax.custom_batching.custom_vmap(_by_device(function))

    @call.def_vmap
    def rule(size, is_mapped, rows, shared):
        if size == 0:
            return _of_nothing(call, is_mapped, (rows, shared))
        repeat = lambda x, mapped: x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        rows = jax.tree.map(repeat, rows, is_mapped[0])
        if any(jax.tree.leaves(is_mapped[1])):
            shared = jax.tree.map(repeat, shared, is_mapped[1])
            out = jax.lax.map(lambda x: call(*x), (rows, shared))
        else:
            out = call(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows), shared)
            out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_vjp
    def call_with_vjp(rows, shared):
        return call(rows, shared)

    def forward(rows, shared):  # which is itself differentiated, from the third order on
        return call_with_vjp(rows, shared), (rows, shared)

    def backward(residuals, cotangents):
        rows, shared = residuals

        def pull_back(rows_and_cotangents, shared):
            rows, cotangents = rows_and_cotangents
            forward = lambda rows: (differentiable or function)(rows, shared)
            return jax.vjp(forward, rows)[1](cotangents)[0]

        return fold_vmap(pull_back)((rows, cotangents), shared), None

    call_with_vjp.defvjp(forward, backward)
    return call_with_vjp


def _of_nothing(function, is_mapped, args):
    """A vmap rule for no calls at all."""
    one = jax.tree.map(
        lambda x, mapped: jax.ShapeDtypeStruct(x.shape[mapped:], x.dtype), args, tuple(is_mapped)
    )
    out = jax.eval_shape(function, *one)
    out = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), out)
    return out, jax.tree.map(lambda _: True, out)


def _by_device(function):
    """Makes every device run `function` on the rows and heads that it holds.

    `function` is as in `fold_vmap`. The first two arrays of `rows` are the query and the key. The
    third axis of arrays, and of results, is that of the heads; results without one are sums over
    the heads. Left to itself, XLA would ask all devices which branch to take, and gather the
    operands of a kernel.
    """

    def run(rows, shared):
        leaves, tree = jax.tree.flatten(rows)
        heads, kv_heads, number = leaves[0].shape[2], leaves[1].shape[2], len(leaves)

        @custom_partitioning
        def call(leaves, shared):
            return function(tree.unflatten(leaves), shared)

        def partition(mesh, arguments, results):
            sharding = arguments[0][0].sharding  # without a spec, if nothing is sharded
            split = leading_spec(mesh, getattr(sharding, "spec", (None,) * 3))
            place = lambda x: NamedSharding(mesh, PartitionSpec(*split[: len(x.shape)]))
            whole = lambda _: NamedSharding(mesh, PartitionSpec())

            def local(leaves, shared):
                add = lambda x: x if x.ndim > 2 or not split[2] else jax.lax.psum(x, split[2])
                with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # not the caller's
                    return jax.tree.map(add, function(tree.unflatten(leaves), shared))

            arguments = (jax.tree.map(place, arguments[0]), jax.tree.map(whole, arguments[1]))
            return mesh, local, jax.tree.map(place, results), arguments

        def leading_spec(mesh, spec):
            """How all arrays are split: as the query, by what the heads of the key can be too."""
            names = (spec[2],) if isinstance(spec[2], str) else spec[2] or ()
            divides = kv_heads % math.prod(mesh.shape[name] for name in names) == 0
            return spec[0], None, names if divides else ()

        def rule(mesh, arguments, results):
            """Axes of one name are split alike: what is known of one array is passed to others."""
            fresh = (f"axis{i}" for i in itertools.count())
            # A factor of 1 is none. One that an axis of the mesh does not divide would be split by
            # part of that axis, which JAX cannot say.
            nested = heads > kv_heads > 1 and all(kv_heads % n == 0 for n in mesh.shape.values())
            groups = {"group": heads // kv_heads} if nested else {}
            query_head = "(head group)" if nested else "group"

            def axes(x, in_rows=True):
                names = [next(fresh) for _ in x.shape]
                if in_rows:
                    names[0] = "batch"
                    if len(names) > 2:
                        names[2] = "head" if x.shape[2] == kv_heads else query_head
                return " ".join(names)

            arguments = (axes(x, i < number) for i, x in enumerate(arguments))
            text = f"{', '.join(arguments)} -> {', '.join(map(axes, results))}"
            return text, groups

        call.def_partition(partition, sharding_rule=rule)
        return call(leaves, shared)

    return run


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` under `jit`, or callers without one would wait for the compiler with every call.

    Not where types say how arrays are sharded: what gradients keep of the work in `in_auto_axes`
    would leave the `jit` with types that JAX does not take outside of it.
    """
    under_jit = eqx.filter_jit(function)

    @wraps(function)
    def call(*args):
        typed = jax.sharding.get_abstract_mesh().explicit_axes
        return function(*args) if typed else under_jit(*args)

    return call


def in_auto_axes(run, inputs, specs) -> Any:
    """`run(inputs)`, where types may say how arrays are sharded (axes of `AxisType.Explicit`).

    They do not say so to `run`: to it all axes are of `AxisType.Auto`, which `_by_device` is for.
    The types of its results say again what that of the query does: theirs are
    `specs(batch, seq, heads)`.
    """
    sharding = jax.typeof(inputs.q).sharding
    axes = sharding.mesh.explicit_axes
    if not axes:
        return run(inputs)

    def put(tree):
        """On the mesh, where not all arguments are, nor what kernels return. XLA leaves it out."""
        return jax.tree.map(lambda x: x * jnp.ones((), x.dtype), tree)

    def call(typed):
        return put(run(eqx.combine(typed, put(rest))))

    typed, rest = eqx.partition(inputs, lambda x: bool(jax.typeof(x).sharding.mesh.explicit_axes))
    places = jax.tree.map(partial(NamedSharding, sharding.mesh), specs(*sharding.spec[:3]))
    return jax.sharding.auto_axes(call, axes=axes, out_sharding=places)(typed)


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
    # The value is marked again, for derivatives of derivatives (`jax.hessian`).
    return _reverse_mode_only(message, x), _tangent_p.bind(t, message=message)


def _refuse(*_, message):
    raise NotImplementedError(message)


_tangent_p = Primitive("linrec_tangent")
_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda t, *, message: t)
ad.deflinear2(_tangent_p, lambda ct, _, *, message: [ct])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _refuse)


def saved_by_checkpoints(x):
    """Returns `x`, which `jax.checkpoint` keeps whatever its policy, instead of computing it again.

    For what is dear to compute and small to keep. With `jax.ad_checkpoint.checkpoint_name`, every
    caller of `jax.checkpoint` would have to say so.
    """
    return _saved_p.bind(x)


def _save(policy, unknown, instantiated, equation):
    """Computed before the backward pass, and not again in it, if that is possible at all."""
    del policy, instantiated
    if unknown[0]:
        return None, equation, [True], [True], []
    return equation, None, [False], [False], []


_saved_p = Primitive("linrec_saved")
_saved_p.def_impl(lambda x: x)
_saved_p.def_abstract_eval(lambda x: x)
ad.deflinear2(_saved_p, lambda ct, _: [ct])
batching.defvectorized(_saved_p)
mlir.register_lowering(_saved_p, lambda _, x: [x])
partial_eval.partial_eval_jaxpr_custom_rules[_saved_p] = _save
