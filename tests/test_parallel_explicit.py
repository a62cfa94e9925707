"""Shardings that are part of types, against one device."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import linrec

from .helpers import (
    assert_close,
    Case,
    check,
    evaluate,
    METHODS,
    PACKING,
    reference,
    relative_error,
)
from .nn_cases import layers, LENGTH, SIZE, VOCAB
from .test_parallel import make_mesh


EXPLICIT = (AxisType.Explicit,) * 2
MIXED = (AxisType.Auto, AxisType.Explicit)
TOKENS = ("query", "key", "value", "g", "gk", "gv")


def place(mesh, spec, arguments, names=None):
    """Puts arguments on devices; those that are not in `names` are whole on each."""
    batch, _, heads = spec
    specs = dict.fromkeys(TOKENS, spec) | {
        "g_gamma": (batch, heads), "initial_state": (batch, heads), "softmax_scale": (batch,)
    }  # fmt: skip
    placed = {}
    for name, x in arguments.items():
        here = specs[name][: x.ndim] if names is None or name in names else ()
        placed[name] = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*here)))
    return placed


def spec_of(x):
    return tuple(jax.typeof(x).sharding.spec)


@pytest.mark.core
@pytest.mark.parametrize("method", ["scan", "chunked-16", "segmented", "auto"])
def test_rows_and_heads(method):
    put = partial(place, make_mesh(*EXPLICIT, data=2, model=2), ("data", None, "model"))
    case = Case("all", T=40)
    actual = check(case, METHODS[method], put)
    assert spec_of(actual["output"]) == ("data", None, "model", None)
    assert spec_of(actual["final_state"]) == ("data", "model", None, None)
    for name, x in put(case.arguments()).items():
        assert jax.typeof(actual[f"gradient of {name}"]) == jax.typeof(x), name


@pytest.mark.parametrize("method", ["scan", "chunked-16", "segmented"])
def test_heads_of_packed_sequences(method):
    mesh = make_mesh(*EXPLICIT, data=2, model=2)
    case = Case("gk-and-g_gamma", packing=PACKING, reverse=True)
    with jax.set_mesh(mesh):
        actual = check(case, METHODS[method], partial(place, mesh, (None, None, "model")))
    assert spec_of(actual["output"]) == (None, None, "model", None)
    assert spec_of(actual["final_state"]) == (None, "model", None, None)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("types", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
def test_what_devices_share(types, jit):
    """Only the query is sharded: the gradients of all else are sums over devices."""
    mesh = make_mesh(*types, data=2, model=2)
    arguments = Case("g_gamma", T=20, Hkv=1, with_state=False).arguments()
    arguments["g_gamma"] = arguments["g_gamma"][0]
    placed = place(mesh, ("data", None, "model"), arguments, names=["query"])

    def both(arguments):
        out, pull_back = jax.vjp(lambda x: linrec.recurrent(**x), arguments)
        return out, pull_back(out)

    actual, expected = (jax.tree.leaves(jit(both)(x)) for x in (placed, arguments))
    for a, e in zip(actual, expected, strict=True):
        assert relative_error(a, e) < 1e-6


@pytest.mark.parametrize("method", ["scan", "auto"])
def test_vmap(method):
    """Over rows that are sharded, which types inside do not say."""
    case = Case("all", T=40, batched=False)
    rows = [case._replace(seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(row.arguments() for row in rows))
    placed = place(make_mesh(*EXPLICIT, data=2, model=2), ("data", None, "model"), stacked)
    run = lambda arguments: evaluate(arguments, case.options(), METHODS[method])
    actual = jax.jit(jax.vmap(run))(placed)
    assert spec_of(actual["output"]) == ("data", None, "model", None)
    for i, row in enumerate(rows):
        of_row = {name: x[i] for name, x in jax.device_get(actual).items()}
        assert_close(of_row, reference(row), "float32", {})


@pytest.mark.parametrize(
    "types", [(AxisType.Auto,), (AxisType.Explicit,)], ids=["auto", "explicit"]
)
def test_nothing_is_sharded(types):
    """In a program for several devices nevertheless."""
    case = Case("gk", T=20, with_state=False)
    with jax.set_mesh(make_mesh(*types, data=2)):
        actual = evaluate(jax.device_get(case.arguments()), case.options(), METHODS["auto"])
    assert_close(actual, reference(case), "float32", {})


def test_step():
    arguments = Case("all", T=1).arguments()
    placed = place(make_mesh(*EXPLICIT, data=2, model=2), ("data", None, "model"), arguments)

    def step(arguments):
        token = {n: jnp.squeeze(x, 1) if n in TOKENS else x for n, x in arguments.items()}
        return linrec.step(token.pop("initial_state"), **token)

    for a, e in zip(step(placed), step(arguments), strict=True):
        assert spec_of(a)[:2] == ("data", "model")
        assert relative_error(a, e) < 1e-6


def test_sequence():
    """Gathered or, with the method for it, not."""
    mesh = make_mesh(*EXPLICIT, data=2, seq=2)
    put = partial(place, mesh, ("data", "seq", None))
    parallel = linrec.SequenceParallel(METHODS["chunked-16"], mesh, "seq", batch_axis="data")
    for method in (METHODS["chunked-16"], parallel):
        actual = check(Case("gk", T=40), method, put)
        assert spec_of(actual["output"]) == ("data", "seq", None, None)
        assert spec_of(actual["final_state"]) == ("data", None, None, None)


def compare_with_one_device(run, layer, x):
    """On a mesh as `jax.make_mesh` makes it: its axes are explicit."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    whole, of_rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    arrays, static = eqx.partition(layer, eqx.is_array)
    with jax.set_mesh(mesh):
        placed = eqx.combine(jax.device_put(arrays, whole), static)
        actual = run(placed, jax.device_put(x, of_rows))
    expected = run(layer, x)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, actual, expected))) < 1e-5


def test_language_model():
    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def run(model, tokens):
        losses, _ = jax.vmap(lambda t: model.loss(t[:-1], t[1:]))(tokens)
        return jnp.sum(losses)

    tokens = jax.random.randint(jax.random.key(1), (4, LENGTH + 1), 0, VOCAB)
    compare_with_one_device(run, layers()["hybrid_model"](jax.random.key(0)), tokens)


def test_layer_without_jit():
    @eqx.filter_value_and_grad
    def run(layer, x):
        return jnp.sum(jnp.sin(jax.vmap(layer)(x)[0]))

    x = jax.random.normal(jax.random.key(1), (4, LENGTH, SIZE))
    compare_with_one_device(run, layers()["retention"](jax.random.key(0)), x)
