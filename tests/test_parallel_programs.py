"""What programs for several devices send, read from compiled text."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import linrec
from linrec._method import _exchange
from linrec.benchmark._collectives import collectives, meanwhile, received_bytes, waiting
from linrec.benchmark._training_step import h100_devices

from .helpers import METHODS, relative_error
from .test_parallel import make_mesh, parallel


GATES = ("g", "g_gamma", "gk", "gv")
TYPES = {"auto": (AxisType.Auto,) * 2, "explicit": (AxisType.Explicit,) * 2}


def given(mesh: Mesh, *spec, B=4, T=64, H=8, K=16, V=8, gates=GATES, dtype=jnp.float32):
    shapes = {
        "query": (B, T, H, K), "key": (B, T, H // 2, K), "value": (B, T, H // 2, V),
        "g": (B, T, H), "gk": (B, T, H, K), "gv": (B, T, H, V), "g_gamma": (B, H),
    }  # fmt: skip
    batch, _, heads = spec
    specs = dict.fromkeys(shapes, PartitionSpec(*spec)) | {"g_gamma": PartitionSpec(batch, heads)}
    return {
        name: jax.ShapeDtypeStruct(
            shapes[name],
            jnp.float32 if name.startswith("g") else dtype,
            sharding=NamedSharding(mesh, specs[name]),
        )
        for name in ("query", "key", "value", *gates)
    }


def forward(method, arguments):
    return linrec.recurrent(**arguments, method=method)[0]


def both(method, arguments, wrap=lambda f: f):
    """From a cotangent that is at hand: a loss would be a sum over devices."""
    o, pull_back = jax.vjp(wrap(partial(forward, method)), arguments)
    return o, pull_back(o)


def both_from_ones(method, arguments):
    """From a cotangent that does not wait for the output."""
    o, pull_back = jax.vjp(partial(forward, method), arguments)
    return o, pull_back(jnp.ones_like(o))


def text(function, arguments, **options):
    return jax.jit(function).lower(arguments).compile(options or None).as_text()


@pytest.mark.core
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("run", [forward, both])
@pytest.mark.parametrize("method", ["chunked-16", "scan", "segmented"])
def test_rows_and_heads_send_nothing(method, run, types):
    arguments = given(make_mesh(*types, data=2, model=2), "data", None, "model")
    assert collectives(text(partial(run, METHODS[method]), arguments), 4) == []


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize(("run", "launches"), [(forward, 2), (both, 5)])
def test_rows_and_heads_of_kernels_send_nothing(run, launches, types):
    """Compiled for eight H100s that are not there."""
    mesh = Mesh(np.array(h100_devices()).reshape(4, 2), ("data", "model"), types)
    arguments = given(mesh, "data", None, "model", dtype=jnp.bfloat16)
    method = linrec.Triton(compute_capability=90)
    compiled = text(partial(run, method), arguments, xla_gpu_autotune_level=0)
    assert collectives(compiled, 8) == []
    assert compiled.count('custom_call_target="triton_kernel_call"') == launches


@pytest.mark.parametrize(
    ("heads", "sizes"),
    [("model", {}), (None, {"H": 2, "gates": ("g",)})],
    ids=["heads", "one-key-head"],
)
def test_rows_and_heads_give_the_same(heads, sizes):
    mesh = make_mesh(data=2, model=2)
    given_here = given(mesh, "data", None, heads, **sizes)
    key = jax.random.key(0)
    arguments = {
        name: -jnp.abs(jax.random.normal(key, x.shape, x.dtype)) / 8
        for name, x in given_here.items()
    }
    run = jax.jit(partial(both, METHODS["chunked-16"]))
    placed = jax.device_put(arguments, jax.tree.map(lambda x: x.sharding, given_here))
    for actual, expected in zip(
        jax.tree.leaves(run(placed)), jax.tree.leaves(run(arguments)), strict=True
    ):
        assert relative_error(actual, expected) < 1e-6
        assert not actual.sharding.is_fully_replicated


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_fewer_key_heads_than_devices(types):
    mesh = make_mesh(*types, data=1, model=4)
    of_heads, whole = (NamedSharding(mesh, PartitionSpec(None, None, x)) for x in ("model", None))
    q, k, v = (
        jax.random.normal(jax.random.key(i), (2, 64, H, 16)) for i, H in enumerate((8, 2, 2))
    )
    arguments = {"query": q, "key": k, "value": v}
    places = {"query": of_heads, "key": whole, "value": whole}
    run = jax.jit(partial(both, METHODS["chunked-16"]))
    actual, expected = run(jax.device_put(arguments, places)), run(arguments)
    assert max(jax.tree.leaves(jax.tree.map(relative_error, actual, expected))) < 1e-6


@pytest.mark.core
@pytest.mark.parametrize("exchange", ["all_gather", "log_step"])
def test_one_exchange_each_way_whatever_the_length(exchange):
    P, B, H, K, V = 8, 2, 4, 16, 8
    method = parallel(P, linrec.Chunked(), exchange=exchange)
    # Without `g_gamma`, whose gradient is a sum over devices.
    sizes = dict(B=B, H=H, K=K, V=V, gates=("g", "gk", "gv"))
    state_and_decay = 4 * B * H * (K * V + K + V)
    kind, number = ("all-gather", 1) if exchange == "all_gather" else ("collective-permute", 4)
    for run, passes in ((forward, 1), (both, 2)):
        for T in (512, 32768):
            arguments = given(method.mesh, None, "seq", None, T=T, **sizes)
            sent = collectives(text(partial(run, method), arguments), P)
            assert [collective.kind for collective in sent] == [kind] * number * passes
            total = sum(collective.received_bytes for collective in sent)
            states = P - 1 if exchange == "all_gather" else number
            assert total == passes * states * state_and_decay


@pytest.mark.parametrize(("shards", "gathers", "steps"), [(8, 1, 0), (16, 0, 5), (1024, 0, 11)])
def test_many_shards_take_steps(shards, gathers, steps):
    mesh = jax.sharding.AbstractMesh((shards,), ("seq",))
    method = linrec.SequenceParallel(METHODS["scan"], mesh, "seq")
    x = jax.ShapeDtypeStruct((shards, 1, 2), jnp.float32)
    traced = str(jax.make_jaxpr(lambda x: linrec.recurrent(x, x, x, method=method))(x))
    assert (traced.count("all_gather["), traced.count("ppermute[")) == (gathers, steps)


def test_plain_jit_sends_the_tokens():
    """What `SequenceParallel` is for; and the count of bytes does count."""
    mesh = make_mesh(seq=8)
    sent = [
        received_bytes(text(partial(forward, linrec.Chunked()), arguments), 8)
        for arguments in (given(mesh, None, "seq", None, T=T) for T in (512, 1024))
    ]
    assert sent[1] == 2 * sent[0] > 0


@pytest.mark.parametrize(
    ("run", "overlap", "launches", "wait"),
    # Without overlap all but one wait: the walk back, which begins with cotangents.
    [(forward, True, 2, 0), (both_from_ones, True, 5, 0), (both_from_ones, False, 5, 4)],
)
def test_overlap(run, overlap, launches, wait):
    """No kernel waits for an exchange, and some are scheduled while one is under way."""
    mesh = Mesh(np.array(h100_devices()), ("seq",))
    method = linrec.SequenceParallel(
        linrec.Triton(compute_capability=90), mesh, "seq", overlap=overlap
    )
    arguments = given(mesh, None, "seq", None, gates=("gk",), T=512, dtype=jnp.bfloat16)
    compiled = text(
        partial(run, method),
        arguments,
        xla_gpu_autotune_level=0,
        xla_gpu_enable_latency_hiding_scheduler=True,
    )
    kernels = lambda lines: sum('="triton_kernel_call"' in line for line in lines)
    assert kernels(compiled.splitlines()) == launches
    assert kernels(waiting(compiled)) == wait
    assert not overlap or kernels(meanwhile(compiled)) > 0


@pytest.mark.parametrize("saved", [True, False])
def test_checkpoint_does_not_gather_again(saved, monkeypatch):
    if not saved:  # so that the test can fail
        monkeypatch.setattr(_exchange, "saved_by_checkpoints", lambda x: x)
    method = parallel(4, overlap=saved)
    arguments = given(method.mesh, None, "seq", None, gates=("gk",))
    sent = collectives(text(partial(both, method, wrap=jax.checkpoint), arguments), 4)
    assert [collective.kind for collective in sent] == ["all-gather"] * (2 if saved else 3)


def test_scan_chunks_does_not_gather_again():
    layer = linrec.nn.LinearAttention(4, 1, dtype=jnp.float32, key=jax.random.key(0))
    method = parallel(2)

    def gradient(xs):
        run = lambda xs, state: layer(xs, state, method=method)
        ys, pull_back = jax.vjp(lambda xs: linrec.scan_chunks(run, xs, layer.state, 8)[0], xs)
        return pull_back(ys)

    lines = text(gradient, jax.ShapeDtypeStruct((32, 4), jnp.float32)).splitlines()
    # Besides, the tokens are gathered: the result has no sharding.
    exchanges = [line for line in lines if " all-gather(" in line and "shard_map" in line]
    assert len(exchanges) == 2


def train_step(mesh, *spec, T, **options):
    """Of a small model of both kinds of layers, with tokens that are sharded as told."""

    def make_mixer(layer_idx, key):
        if layer_idx == 1:
            return linrec.nn.SlidingWindowAttention(8, 2, window=4, dtype=jnp.float32, key=key)
        return linrec.nn.GatedLinearAttention(8, 2, conv_size=3, dtype=jnp.float32, key=key)

    model = linrec.nn.LanguageModel(
        make_mixer, 2, 16, mlp_size=8, dtype=jnp.float32, key=jax.random.key(0)
    )
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    arrays = jax.device_put(arrays, NamedSharding(mesh, PartitionSpec()))
    tokens = jax.random.randint(jax.random.key(1), (4, T + 1), 0, 16, jnp.int32)
    placed = NamedSharding(mesh, PartitionSpec(*spec))
    xs, ys = (jax.device_put(x, placed) for x in (tokens[:, :-1], tokens[:, 1:]))

    def gradient(arrays, xs, ys):
        def total(arrays):
            loss = lambda x, y: eqx.combine(arrays, static).loss(x, y, **options)[0]
            return jnp.sum(jax.vmap(loss, spmd_axis_name=spec[0])(xs, ys))

        return jax.value_and_grad(total)(arrays)

    return jax.jit(gradient), (arrays, xs, ys)


def test_training_with_rows_and_sequences_sharded():
    mesh = make_mesh(data=2, seq=4)
    f, arguments = train_step(make_mesh(data=1), "data", T=32)
    expected = f(*arguments)
    f, arguments = train_step(mesh, "data", T=32)
    compiled = f.lower(*arguments).compile()
    # The gradients of the parameters are sums over the devices; that is all.
    assert {c.kind for c in collectives(compiled.as_text(), 2)} == {"all-reduce"}
    results = [compiled(*arguments)]
    method = linrec.SequenceParallel(linrec.Chunked(8), mesh, "seq")
    sent = []
    for T in (64, 32):
        f, arguments = train_step(mesh, "data", "seq", T=T, method=method)
        compiled = f.lower(*arguments).compile()
        sent.append(collectives(compiled.as_text(), 4))
    assert sent[0] == sent[1]
    assert [c.kind for c in sent[0]].count("all-gather") == 2
    results.append(compiled(*arguments))
    for result in results:
        for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert relative_error(a, e) < 1e-5
