"""What devices send each other when the sequence axis is sharded, and what follows for many.

Read from programs that are compiled, not run, for simulated devices.
"""

import argparse
import math
import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

import linrec

from ._collectives import received_bytes
from ._options import add_output_option, at_least, PASSES, refuse
from ._report import MIB, print_table, progress, write_json, write_lines


# NVIDIA's data sheets: H100 SXM, dense bfloat16; DGX H100, one 400 Gb/s InfiniBand port per GPU.
PEAK_FLOPS = 989e12
LINK_BYTES = 50e9
# Assumptions.
UTILISATION = 0.4
LATENCY = 10e-6  # seconds, of one message
TOKEN_SHARE = 0.5  # of the bytes of tokens, which are counted in float32 and sent in bfloat16
CHUNK = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes: dict[str, Any] = {"type": at_least(1), "metavar": "N", "help": "(default: %(default)s)"}
    devices: dict[str, Any] = {**sizes, "type": at_least(2)}
    parser.add_argument("--devices", default=8, **devices)
    parser.add_argument("--heads", default=16, **sizes)
    parser.add_argument("--channels", default=128, **sizes)
    parser.add_argument("--lengths", nargs="+", default=[512, 2048, 8192, 32768], **sizes)
    parser.add_argument("--many", nargs="+", default=[64, 256, 1024], **devices)
    parser.add_argument("--tokens-per-device", default=8192, **sizes)
    add_output_option(parser)


def main(args: argparse.Namespace) -> None:
    if any(length % args.devices for length in args.lengths):
        refuse(f"argument --lengths: expected multiples of {args.devices} devices")
    # In a process of its own: how many devices are simulated is settled when JAX starts.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        records = pool.apply(_measure, (args,))
    _print_bytes(args, records)
    projection = _project(args, records)
    _print_projection(args, projection)
    write_json(args.output / "parallel.json", "parallel", [*records, *projection])
    lines = {}
    for record in _of_lengths(args, records):
        panel = lines.setdefault(record["pass"], {}).setdefault(record["contestant"], {})
        panel[record["length"]] = record["received_bytes"] / MIB
    write_lines(args.output / "parallel.png", lines, "MiB received by a device", log_y=True)


def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(args.devices, *args.many))
    tasks = [(name, args.devices, T) for name in CONTESTANTS for T in args.lengths]
    tasks += [("linrec, log_step", devices, devices * CHUNK) for devices in args.many]
    tasks = list(dict.fromkeys(tasks))
    records = []
    with progress(len(tasks)) as step:
        for name, devices, length in tasks:
            step(f"{name}, {devices} devices, {length:,} tokens")
            shape = (1, length, args.heads, args.channels)
            for which, size in zip(PASSES, _received(name, devices, shape), strict=True):
                record = {"contestant": name, "devices": devices, "length": length, "pass": which}
                records.append(record | {"received_bytes": size})
    return records


def _received(name: str, devices: int, shape: tuple[int, ...]) -> tuple[int, int]:
    mesh = Mesh(jax.devices()[:devices], ("seq",))
    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    run = partial(CONTESTANTS[name], mesh)

    def both(q, k, v, gk, d_o):
        o, pull_back = jax.vjp(run, q, k, v, gk)
        return o, pull_back(d_o)

    def received(function: Callable, arguments: int) -> int:
        compiled = jax.jit(function, out_shardings=sharding).lower(*[x] * arguments).compile()
        return received_bytes(compiled.as_text() or "", devices)

    return received(run, 4), received(both, 5)


def _sharded(exchange: Literal["all_gather", "log_step"], mesh: Mesh, q, k, v, gk) -> Array:
    method = linrec.SequenceParallel(linrec.Chunked(), mesh, "seq", exchange=exchange)
    return linrec.recurrent(q, k, v, gk=gk, method=method)[0]


def _plain(mesh: Mesh, q: Array, k: Array, v: Array, gk: Array) -> Array:
    del mesh
    return linrec.recurrent(q, k, v, gk=gk, method=linrec.Chunked())[0]


def _ring_attention(mesh: Mesh, q: Array, k: Array, v: Array, gk: Array) -> Array:
    """Softmax attention: keys and values go around, and every device meets all of them."""
    del gk
    spec = PartitionSpec(None, "seq")
    devices = mesh.shape["seq"]
    around = [(i, (i + 1) % devices) for i in range(devices)]

    @partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec)
    def run(q, k, v):
        _, T, _, K = q.shape
        rank, t = jax.lax.axis_index("seq"), jnp.arange(T, dtype=jnp.int32)
        o, total = jnp.zeros_like(q), jnp.zeros_like(q[..., 0])
        largest = jnp.full_like(total, -jnp.inf)
        for i in range(devices):
            if i > 0:
                k, v = jax.lax.ppermute((k, v), "seq", around)
            seen = t[:, None] + rank * T >= t[None] + (rank - i) % devices * T
            scores = jnp.einsum("bthk,bshk->bths", q, k) * K**-0.5
            scores = jnp.where(seen[None, :, None], scores, -jnp.inf)
            new = jnp.maximum(largest, jnp.max(scores, -1))
            weights, shrink = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
            o = o * shrink[..., None] + jnp.einsum("bths,bshv->bthv", weights, v)
            total, largest = total * shrink + jnp.sum(weights, -1), new
        return o / total[..., None]

    return run(q, k, v)


CONTESTANTS = {
    "linrec, all_gather": partial(_sharded, "all_gather"),
    "linrec, log_step": partial(_sharded, "log_step"),
    "plain jit": _plain,
    "ring attention": _ring_attention,
}


def _project(args: argparse.Namespace, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time of a layer, forward and backward, with so many tokens on each of many devices.

    The recurrence's bytes are those of the program for as many devices; those of the others are
    scaled from fewer devices, by the tokens that come from elsewhere. Plain `jit` does not send
    while it computes.
    """
    H, K, L = args.heads, args.channels, args.tokens_per_device
    size, last = H * K, args.lengths[-1]
    dense = 3 * 2 * 12 * size**2 * L  # projections and MLP
    product = 3 * 2 * L * H * K * K
    recurrence = 3 * 2 * L * H * 2 * CHUNK * K + 2 * product
    seconds = lambda flops: flops / (UTILISATION * PEAK_FLOPS)
    both = [r for r in records if r["pass"] == PASSES[1]]
    per_token = {
        r["contestant"]: TOKEN_SHARE * r["received_bytes"] / (last * (1 - 1 / args.devices))
        for r in both
        if r["length"] == last and r["devices"] == args.devices
    }
    projection = []
    for P in args.many:
        exchanged = next(
            r["received_bytes"]
            for r in both
            if (r["contestant"], r["devices"], r["length"]) == ("linrec, log_step", P, P * CHUNK)
        )
        steps = 2 * (1 + math.ceil(math.log2(P - 1)))
        attention = 3 * 2 * L * (P * L) * size
        elsewhere = (P - 1) * L
        # Work, work that one device would not have to do, bytes, messages.
        plans = {
            "linrec, log_step": (recurrence, 2 * product, exchanged, steps),
            "plain jit": (
                recurrence, (P - 1) * recurrence, per_token["plain jit"] * elsewhere, 2,
            ),
            "ring attention": (
                attention, 0, per_token["ring attention"] * elsewhere, 2 * (P - 1),
            ),
        }  # fmt: skip
        for name, (work, more, received, messages) in plans.items():
            needed = seconds(dense + work)
            sending = received / LINK_BYTES + messages * LATENCY
            hidden = 0 if name == "plain jit" else min(sending, seconds(work))
            taken = needed + seconds(more) + sending - hidden
            projection.append(
                {"contestant": name, "projected_devices": P, "bytes": received}
                | {"sending_seconds": sending, "seconds": taken, "efficiency": needed / taken}
            )
    return projection


def _of_lengths(args: argparse.Namespace, records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in records if r["devices"] == args.devices and r["length"] in args.lengths]


def _print_bytes(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    for which in PASSES:
        rows = []
        for name in CONTESTANTS:
            chosen = [r for r in _of_lengths(args, records) if r["pass"] == which]
            sizes = [r["received_bytes"] / MIB for r in chosen if r["contestant"] == name]
            rows.append([name, *(f"{size:,.2f}" for size in sizes)])
        columns = ["", *(f"{T:,} tokens" for T in args.lengths)]
        title = f"MiB received by each of {args.devices} devices, {which}: "
        title += f"{args.heads} heads, {args.channels} channels"
        print_table(title, columns, rows, remarks=False)


def _print_projection(args: argparse.Namespace, projection: list[dict[str, Any]]) -> None:
    rows = [
        [
            r["contestant"],
            f"{r['projected_devices']:,}",
            f"{r['bytes'] / MIB:,.0f}",
            f"{1e3 * r['sending_seconds']:,.2f}",
            f"{1e3 * r['seconds']:,.1f}",
            f"{r['efficiency']:.1%}",
        ]
        for r in projection
    ]
    title = (
        f"Projection: a layer, forward and backward, {args.tokens_per_device:,} tokens on each H100"
    )
    columns = ["", "devices", "MiB received", "sending ms", "layer ms", "efficiency"]
    print_table(title, columns, rows, remarks=False)
