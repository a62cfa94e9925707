"""The sequence axis over several devices, against one."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import linrec
from linrec._method import sequence_parallel

from .helpers import (
    assert_close,
    Case,
    check,
    compare,
    evaluate,
    GATES,
    METHODS,
    PACKING,
    reference,
    relative_error,
)


def make_mesh(*types: AxisType, **axes: int):
    devices = jax.devices()[: functools.reduce(int.__mul__, axes.values())]
    types = types or (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=devices)


def parallel(shards: int, method=METHODS["scan"], **options):
    return linrec.SequenceParallel(method, make_mesh(seq=shards), "seq", **options)


# Sequences that cross no boundary of a shard, one, and several.
PACKINGS = {"dense": None, "packed": PACKING}
ONE_ROW = Case(B=1, T=96)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
# A `g` per key is a `gk` before any method sees it.
@pytest.mark.parametrize("gates", [name for name in GATES if "-" not in name])
def test_every_gate(gates, packing, reverse):
    case = ONE_ROW._replace(gates=gates, packing=packing, reverse=reverse)
    check(case, parallel(4, overlap=True))
    # How many shards there are, and how time runs without overlap, matters to all gates alike.
    for shards in (1, 2, 4, 8) if gates == "all" else () if reverse else (4,):
        check(case, parallel(shards))


@pytest.mark.core
@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_log_steps(packing):
    case = ONE_ROW._replace(gates="all", packing=packing)
    for shards in (2, 4, 8):
        check(case, parallel(shards, exchange="log_step", overlap=shards == 8))


@pytest.mark.parametrize("method", ["chunked-16", "segmented", "auto", "triton"])
def test_every_method(method):
    check(Case("gk-and-g_gamma", B=2, T=96), parallel(2, METHODS[method]))


OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


@OVERLAP
@pytest.mark.parametrize("T", [1, 7, 100])
def test_lengths_that_do_not_divide(T, overlap):
    check(Case("gk", T=T), parallel(8, overlap=overlap))


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_padding_may_hold_anything(reverse):
    case = ONE_ROW._replace(gates="gk", packing=PACKING, reverse=reverse)
    arguments = case.arguments()
    for name in ("query", "key", "value", "gk"):
        arguments[name] = arguments[name].at[:, PACKING[-1] :].set(jnp.nan)
    method = parallel(4, METHODS["chunked-16"], overlap=reverse)
    actual = evaluate(arguments, case.options(), method)
    assert_close(actual, reference(case), "float32", {})


@OVERLAP
@pytest.mark.parametrize("strength", ["strong", "-200", "-inf", "-1e4", "growth"])
def test_gates_of_any_strength(strength, overlap):
    check(ONE_ROW._replace(gates="all", strength=strength), parallel(4, overlap=overlap))


@OVERLAP
def test_gates_that_cancel(overlap):
    """Over a shard the decay of the keys is e^256, that of the values e^-256."""
    arguments = Case("gk", B=1, T=512).arguments()
    grow = jnp.full_like(arguments["gk"], 2.0)
    arguments |= {"gk": grow, "gv": jnp.full((1, 512, 4, 5), -2.0, grow.dtype)}
    compare(arguments, parallel(4, overlap=overlap))


@OVERLAP
def test_growth_of_nothing(overlap):
    """One key channel has no keys and no state: how its gates grow cannot matter."""
    case = Case("gk", B=1, T=256, H=2, Hkv=1)
    arguments = case.arguments()
    arguments["gk"] = arguments["gk"].at[..., 0].set(2.0)
    arguments["key"] = arguments["key"].at[..., 0].set(0.0)
    arguments["initial_state"] = arguments["initial_state"].at[..., 0, :].set(0.0)
    run = lambda method: jax.jit(lambda x: linrec.recurrent(**x, method=method))(arguments)
    methods = parallel(2, overlap=overlap), linrec.Scan()
    actual, expected = (dict(enumerate(run(method))) for method in methods)
    assert_close(actual, expected, "float32", {})


@OVERLAP
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_dtypes(dtype, overlap):
    check(ONE_ROW._replace(gates="all", dtype=dtype), parallel(2, overlap=overlap))


def test_with_batch_and_heads():
    mesh = make_mesh(data=2, model=2, seq=2)
    method = linrec.SequenceParallel(
        METHODS["chunked-16"], mesh, "seq", batch_axis="data", head_axis="model"
    )
    check(Case("all", T=96), method)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
def test_two_by_two_with_batch(packing):
    """Rows under `vmap` are sharded by the name that it is given."""
    method = linrec.SequenceParallel(METHODS["scan"], make_mesh(data=2, seq=2), "seq")
    case = ONE_ROW._replace(gates="all", packing=packing)
    rows = [case._replace(seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(row.arguments() for row in rows))
    sharded = jax.device_put(stacked, NamedSharding(method.mesh, PartitionSpec("data")))
    run = lambda arguments: evaluate(arguments, case.options(), method)
    actual = jax.jit(jax.vmap(run, spmd_axis_name="data"))(sharded)
    for i, row in enumerate(rows):
        assert_close(jax.tree.map(lambda x, i=i: x[i], actual), reference(row), "float32", {})


@pytest.mark.core
@OVERLAP
def test_without_the_exchange_it_fails(monkeypatch, overlap):
    case = ONE_ROW._replace(gates="gk", V=3)
    method = parallel(2, METHODS["chunked-16"], overlap=overlap)
    nothing = lambda ring, shard: jnp.zeros_like(shard.state)
    monkeypatch.setattr(sequence_parallel, "incoming", nothing)
    with pytest.raises(AssertionError, match="output"):
        check(case, method)


@pytest.mark.core
def test_one_shard_under_vmap():
    """Rows of the batch are on devices of their own, and the sequence on one."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 1, 2))
    one = linrec.SequenceParallel(linrec.Auto(), make_mesh(data=2, seq=1), "seq")

    def gradient(method):
        o = lambda x: linrec.recurrent(x, x, x, gk=-jnp.abs(x), method=method)[0]
        return jax.grad(lambda x: jnp.sum(jax.vmap(o, spmd_axis_name="data")(x) ** 2))(x)

    assert relative_error(gradient(one), gradient(linrec.Auto())) < 1e-5


def test_second_order():
    case = Case("gk", B=1, T=8, H=2, Hkv=1, K=3, V=2)
    arguments = {name: x.astype(jnp.float64) for name, x in case.arguments().items()}

    def size_of_gradient(method, arguments):
        def loss(arguments):
            o, state = linrec.recurrent(**arguments, method=method)
            return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

        return sum(jnp.sum(x**2) for x in jax.grad(loss)(arguments).values())

    gradient = lambda method: jax.jit(jax.grad(functools.partial(size_of_gradient, method)))
    expected = gradient(linrec.Scan())(arguments)
    for overlap in (False, True):
        assert_close(gradient(parallel(2, overlap=overlap))(arguments), expected, "float64", {})


def test_chunk_size_is_of_every_shard():
    method = parallel(4, linrec.Chunked(16))
    case = ONE_ROW._replace(gates="gk")
    run = jax.jit(lambda arguments: linrec.recurrent(**arguments, method=method, chunk_size=8))
    o, state = run(case.arguments())
    expected = reference(case)
    results = {"output": o, "final_state": state}
    assert_close(results, {name: expected[name] for name in results}, "float32", {})


def test_errors(no_type_checks):
    mesh = make_mesh(data=2, seq=2)
    with pytest.raises(ValueError, match=r"axis='time'.*expects an axis of the mesh"):
        linrec.SequenceParallel(linrec.Auto(), mesh, "time")
    with pytest.raises(ValueError, match=r"axis=\('data', 'seq'\).*expects an axis of the mesh"):
        linrec.SequenceParallel(linrec.Auto(), mesh, ("data", "seq"))
    with pytest.raises(ValueError, match=r"expects different axes.*\['seq', 'seq'\]"):
        linrec.SequenceParallel(linrec.Auto(), mesh, "seq", batch_axis="seq")
    with pytest.raises(ValueError, match=r"exchange=.*'all_gather' or 'log_step'"):
        linrec.SequenceParallel(linrec.Auto(), mesh, "seq", exchange="ring")
    x = jnp.ones((3, 8, 3, 2), jnp.float32)
    for argument, problem in (
        ("batch_axis", "3 rows of the batch to 2 devices"),
        ("head_axis", "3 heads of `key` and `value` to 2 devices"),
    ):
        method = linrec.SequenceParallel(linrec.Auto(), mesh, "seq", **{argument: "data"})
        with pytest.raises(ValueError, match=problem):
            linrec.recurrent(x, x, x, method=method)
