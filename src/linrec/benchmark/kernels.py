"""The Triton kernels, compiled for GPUs and their work counted, with no GPU.

Every kernel is compiled for every target, which tells registers, spills, shared memory, programs
per processor and tensor-core instructions. Triton's interpreter runs them on a CPU and counts what
they read, write and multiply. And XLA compiles a whole training step for an H100, which tells its
memory.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

import linrec

from .._inputs import canonicalise
from ._cases import Case, DTYPES, GATES, parse_shape, write_shapes
from ._compiled import compile_call, TARGETS
from ._options import add_gates_option, add_output_option, at_least
from ._report import print_table, progress, write_bars, write_json


FORWARD = ("walk", "output")
# Bytes per second and, in 16 bit, FLOPs per second.
ROOFLINES = {"A100": (2.04e12, 312e12), "H100": (3.35e12, 989e12)}
STEP_SHAPES = ((1, 8192, 8, 128, 128), (8, 8192, 16, 128, 128))

Records = list[dict[str, Any]]
Step = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_gates_option(parser, list(GATES))
    parser.add_argument(
        "--targets", nargs="*", choices=TARGETS, default=list(TARGETS), help="(default: all)"
    )
    parser.add_argument(
        "--sizes", nargs="+", type=at_least(1), default=[64, 128, 256],
        metavar="K", help="of keys and values (default: 64 128 256)",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--work-shape", type=parse_shape, default=(1, 512, 1, 128, 128),
        metavar="B,T,H,K,V", help="of the problem whose work is counted (default: 1,512,1,128,128)",
    )  # fmt: skip
    parser.add_argument(
        "--step-shapes", nargs="*", type=parse_shape, default=STEP_SHAPES,
        metavar="B,T,H,K,V", help="of training steps that are compiled for an H100 (default: "
        f"{write_shapes(STEP_SHAPES)})",
    )  # fmt: skip
    add_output_option(parser)


def main(args: argparse.Namespace) -> int:
    """Returns 1 if a default spills on sm_80 or sm_90, up to 128 channels in 16 bit."""
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"The kernels need {' and '.join(missing)}. Install what they need with:\n\n"
            '    pip install "linrec[cuda12]"'
        )
    # Both are read when JAX is first used. No GPU is needed, and none can be timed.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    jax.config.update("jax_platforms", "cpu")
    total = len(args.gates) * (len(args.sizes) * len(args.targets) + 1 + len(args.step_shapes))
    with progress(total) as step:
        resources = _resources(args.gates, args.targets, args.sizes, args.dtype, step)
        _print_resources(resources)
        _print_seconds(resources, args.targets)
        work = _work(args.gates, args.work_shape, args.dtype, step)
        _print_work(work, args)
        steps = _training_steps(args.gates, args.step_shapes, args.dtype, step)
        if steps:
            _print_steps(steps)
    write_json(args.output / "kernels.json", "kernels", resources + work + steps)
    _plot(args.output, work, steps)
    spills = [
        x for x in resources
        if x["spilled_bytes"] and x["target"] in ("sm_80", "sm_90") and x["K"] <= 128
    ]  # fmt: skip
    return int(bool(spills) and args.dtype != "float32")


def _run(method: linrec.AbstractMethod, arguments: dict[str, Any]):
    """As `linrec.recurrent`, which does not trace again what it has traced before."""
    return method(canonicalise("linrec.recurrent", **arguments)[0])


def _everything(method: linrec.AbstractMethod, arguments: dict[str, Any]):
    """Forward and backward."""
    out, pull_back = jax.vjp(partial(_run, method), arguments)
    return out, pull_back(out)


def _resources(gates, targets, sizes, dtype, step: Step) -> Records:
    from .._triton.call import record_calls

    records = []
    for K in sizes:
        for gate in gates:
            arguments, token = (
                jax.eval_shape(Case((1, T, 8, K, K), gate, dtype).inputs) for T in (1024, 1)
            )
            method = linrec.Triton(interpret=True)
            with record_calls() as calls:
                jax.eval_shape(partial(_everything, method), arguments)
                jax.eval_shape(partial(_run, method), token)
            for target in targets:
                step(f"compiling for {target}: gate {gate}, {K} channels")
                for call in calls:
                    resources = compile_call(call, TARGETS[target])
                    blocks = {n: x for n, x in call.constants.items() if n in _BLOCKS}
                    records.append(
                        {"what": "resources", "kernel": call.name, "gate": gate, "target": target}
                        | {"K": K, "V": K, "warps": call.warps, "stages": call.stages}
                        | {"blocks": blocks, **resources._asdict()}
                    )
    return records


_BLOCKS = ("BT", "BK", "BV", "BC", "BO")


def _print_resources(records: Records) -> None:
    columns = ("K", "warps", "registers", "spilled_bytes", "shared_bytes", "blocks_per_sm")
    columns += ("tensor_core_instructions",)
    rows = [
        [f"{r['kernel']}, gate {r['gate']}", *(str(r[name]) for name in columns), r["target"]]
        for r in records
    ]
    titles = ("K", "warps", "registers", "spilled", "shared", "per SM", "tensor core")
    print_table("Kernels as compiled", ("kernel", *titles, "target"), rows)


def _print_seconds(records: Records, targets: Sequence[str]) -> None:
    seconds = {}
    for r in records:
        if r["kernel"] != "decode":
            total = seconds.setdefault((r["gate"], r["K"]), {}).setdefault(r["target"], [0, 0])
            total[0] += r["seconds"]
            total[1] += r["ptxas_seconds"]
    rows = [
        [f"gate {gate}", str(K)]
        + [f"{by[target][0]:.1f} ({by[target][1]:.1f})" for target in targets]
        for (gate, K), by in seconds.items()
    ]
    title = "Compiling forward and backward: seconds of one core (of these in ptxas)"
    print_table(title, ("", "K", *targets), rows, remarks=False)


def _work(gates, shape, dtype, step: Step) -> Records:
    """What the interpreter counted, with ordinary gates."""
    from .._triton.interpret import count_work

    records = []
    for gate in gates:
        step(f"counting: gate {gate}")
        with count_work() as table:
            arguments = Case(shape, gate, dtype).inputs()
            jax.block_until_ready(_everything(linrec.Triton(interpret=True), arguments))
        passes = {"forward": [], "backward": []}
        for name, work in table.items():
            records.append({"what": "work", "gate": gate, "kernel": name} | _describe([work]))
            passes["forward" if name in FORWARD else "backward"].append(work)
        for name, works in passes.items():
            records.append({"what": "work", "gate": gate, "kernel": name} | _describe(works))
    return records


def _describe(works: list[Any]) -> dict[str, Any]:
    names = ("launches", "bytes_read", "bytes_written", "flops")
    total = {name: sum(getattr(work, name) for work in works) for name in names}
    moved = total["bytes_read"] + total["bytes_written"]
    limits = {
        f"{gpu}_us": 1e6 * max(moved / bandwidth, total["flops"] / peak)
        for gpu, (bandwidth, peak) in ROOFLINES.items()
    }
    return total | limits


def _print_work(records: Records, args: argparse.Namespace) -> None:
    rows = [
        [f"gate {r['gate']}", str(r["launches"])]
        + [f"{r[name] / 1e6:.2f}" for name in ("bytes_read", "bytes_written")]
        + [f"{r['flops'] / 1e9:.3f}", f"{r['A100_us']:.2f}", f"{r['H100_us']:.2f}", r["kernel"]]
        for r in records
        if r["kernel"] in ("forward", "backward")
    ]
    columns = ("", "launches", "MB read", "MB written", "GFLOP", "A100 us", "H100 us", "pass")
    title = f"Work at {args.work_shape}, {args.dtype}; us: at the least, by what is moved"
    print_table(title, columns, rows)


def _training_steps(gates, shapes, dtype, step: Step) -> Records:
    if not shapes:
        return []
    from ._training_step import h100, step_memory

    sharding = h100()
    methods = {
        "Triton": linrec.Triton(compute_capability=90),
        "Chunked": linrec.Chunked(),
        "Scan": linrec.Scan(),
    }
    records = []
    for shape in shapes:
        for gate in gates:
            step(f"a training step for an H100: {shape}, gate {gate}")
            arguments = jax.eval_shape(Case(shape, gate, dtype).inputs)
            for name, method in methods.items():
                memory = step_memory(method, arguments, sharding)
                records.append(
                    {"what": "training_step", "shape": shape, "gate": gate, "method": name}
                    | memory._asdict()
                )
    return records


def _print_steps(records: Records) -> None:
    rows = [
        [f"{r['shape']}, gate {r['gate']}"]
        + [f"{r[name] / 1e6:.1f}" for name in ("forward_bytes", "both_bytes")]
        + [r["method"]]
        for r in records
    ]
    columns = ("", "forward MB", "forward+backward MB", "method")
    print_table("Temporaries of a training step compiled for an H100", columns, rows)


def _plot(folder: Path, work: Records, steps: Records) -> None:
    moved, memory = {}, {}
    for r in work:
        if r["kernel"] in ("forward", "backward"):
            bars = moved.setdefault(("Triton", "read and written"), {}).setdefault(r["gate"], {})
            bars[r["kernel"]] = (r["bytes_read"] + r["bytes_written"]) / 1e6
    for r in steps:
        bars = memory.setdefault(("H100", str(r["shape"])), {}).setdefault(r["gate"], {})
        bars[r["method"]] = r["both_bytes"] / 1e6
    if moved:
        write_bars(folder / "kernels-work.png", moved, "MB")
    if memory:
        write_bars(folder / "kernels-memory.png", memory, "temporary MB, forward+backward")
