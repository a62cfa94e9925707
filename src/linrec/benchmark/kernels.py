"""The Triton kernels, compiled for GPUs and their work counted, with no GPU.

Every kernel is compiled for every target, which tells registers, spills, shared memory, programs
per processor and tensor-core instructions. Triton's interpreter runs them on a CPU and counts what
they read, write and multiply. And XLA compiles a whole training step for an H100, which tells its
memory.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import linrec


GATES = {
    "none": (),
    "scalar": ("g",),
    "fixed": ("g_gamma",),
    "key": ("gk",),
    "value": ("gv",),
    "all": ("g", "g_gamma", "gk", "gv"),
}
FORWARD = ("walk", "output")
# Bytes per second and, in 16 bit, FLOPs per second.
ROOFLINES = {"A100": (2.04e12, 312e12), "H100": (3.35e12, 989e12)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    targets = ("sm_80", "sm_90", "sm_100", "gfx942")
    parser.add_argument("--gates", nargs="+", choices=GATES, default=list(GATES))
    parser.add_argument("--targets", nargs="*", choices=targets, default=list(targets))
    parser.add_argument("--sizes", nargs="+", type=int, default=[64, 128, 256], metavar="K")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--work-shape", nargs=5, type=int, default=[1, 512, 1, 128, 128],
        metavar=tuple("BTHKV"), help="of the problem whose work is counted",
    )  # fmt: skip
    parser.add_argument(
        "--step-shapes", nargs="*", default=["1,8192,8,128,128", "8,8192,16,128,128"],
        metavar="B,T,H,K,V", help="of training steps that are compiled for an H100",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("benchmark-results"))


def main(args: argparse.Namespace) -> int:
    """Returns 1 if a default configuration spills, up to 128 channels in 16 bit."""
    # Both are read when JAX is first used. No GPU is needed, and none can be timed.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    jax.config.update("jax_platforms", "cpu")
    records = {
        "resources": _resources(args.gates, args.targets, args.sizes, args.dtype),
        "work": _work(args.gates, args.work_shape, args.dtype),
        "training_step": _training_steps(args.gates, args.step_shapes, args.dtype),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "kernels.json"
    path.write_text(json.dumps(records, indent=1))
    print(f"\nwritten to {path}")
    spills = [
        x for x in records["resources"]
        if x["spilled_bytes"] and x["target"] in ("sm_80", "sm_90") and x["K"] <= 128
    ]  # fmt: skip
    return int(bool(spills) and args.dtype != "float32")


def _abstract(name: str, shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    del name
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def problem(
    gates: str, shape: Sequence[int], dtype: str, make: Callable[..., Any] = _abstract
) -> dict[str, Any]:
    """Arguments of `linrec.recurrent`, each made by `make(name, shape, dtype)`."""
    B, T, H, K, V = shape
    shapes = {"query": (B, T, H, K), "key": (B, T, H, K), "value": (B, T, H, V)}
    gate_shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, K), "gv": (B, T, H, V)}
    out = {name: make(name, x, dtype) for name, x in shapes.items()}
    return out | {name: make(name, gate_shapes[name], "float32") for name in GATES[gates]}


def _everything(method: linrec.AbstractMethod, arguments: dict[str, Any]):
    """Forward and backward."""
    out, pull_back = jax.vjp(lambda x: linrec.recurrent(**x, method=method), arguments)
    return out, pull_back(out)


def _resources(gates, targets, sizes, dtype) -> list[dict[str, Any]]:
    from .._triton.call import record_calls
    from ._compiled import compile_call, TARGETS

    records = []
    for K in sizes:
        for gate in gates:
            arguments = problem(gate, (1, 1024, 8, K, K), dtype)
            token = problem(gate, (1, 1, 8, K, K), dtype)
            method = linrec.Triton(interpret=True)
            with record_calls() as calls:
                jax.eval_shape(lambda x: _everything(method, x), arguments)  # noqa: B023
                jax.eval_shape(lambda x: linrec.recurrent(**x, method=method), token)  # noqa: B023
            for target in targets:
                for call in calls:
                    resources = compile_call(call, TARGETS[target])
                    blocks = {n: x for n, x in call.constants.items() if n in _BLOCKS}
                    records.append(
                        {"kernel": call.name, "gates": gate, "target": target, "K": K, "V": K}
                        | {"warps": call.warps, "stages": call.stages, "blocks": blocks}
                        | resources._asdict()
                    )
                    _print_row(records[-1], len(records) == 1)
    return records


_BLOCKS = ("BT", "BK", "BV", "BC", "BO")


def _print_row(record: dict[str, Any], first: bool) -> None:
    """One row at a time: compiling takes long."""
    columns = ("kernel", "gates", "target", "K", "warps", "registers", "spilled_bytes",
               "shared_bytes", "blocks_per_sm", "tensor_core_instructions", "seconds")  # fmt: skip
    if first:
        print(" ".join(f"{name[:13]:>13}" for name in columns))
    cells = (f"{x:.1f}" if isinstance(x := record[n], float) else str(x) for n in columns)
    print(" ".join(f"{cell:>13}" for cell in cells), flush=True)


def _work(gates, shape, dtype) -> list[dict[str, Any]]:
    """What the interpreter counted, with ordinary gates."""
    from .._triton.interpret import count_work

    rng = np.random.default_rng(0)

    def make(name: str, shape: tuple[int, ...], dtype: str) -> jax.Array:
        x = jnp.asarray(rng.standard_normal(shape), jnp.float32)
        return (jax.nn.log_sigmoid(x) / 16 if name.startswith("g") else x).astype(dtype)

    print(f"\nCounted at {tuple(shape)}, {dtype}:")
    titles = ("launches", "MB read", "written", "GFLOP", "A100 us", "H100 us")
    print(" " * 24 + "".join(f"{title:>9}" for title in titles))
    records = []
    for gate in gates:
        with count_work() as table:
            arguments = problem(gate, shape, dtype, make)
            jax.block_until_ready(_everything(linrec.Triton(interpret=True), arguments))
        passes = {"forward": [], "backward": []}
        for name, work in table.items():
            records.append({"gates": gate, "kernel": name} | _describe([work]))
            passes["forward" if name in FORWARD else "backward"].append(work)
        for name, works in passes.items():
            records.append({"gates": gate, "kernel": name} | _describe(works))
            r = records[-1]
            print(
                f"{gate + ' ' + name:24}{r['launches']:9}{r['bytes_read'] / 1e6:9.2f}"
                f"{r['bytes_written'] / 1e6:9.2f}{r['flops'] / 1e9:9.3f}"
                f"{r['A100_us']:9.2f}{r['H100_us']:9.2f}",
                flush=True,
            )
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


def _training_steps(gates, shapes, dtype) -> list[dict[str, Any]]:
    if not shapes:
        return []
    from ._training_step import h100, step_memory

    sharding = h100()
    methods = {
        "Triton": linrec.Triton(compute_capability=90),
        "Chunked": linrec.Chunked(),
        "Scan": linrec.Scan(),
    }
    print("\nTemporaries of a training step compiled for an H100, MB:")
    print(f"{'':34}{'method':>9}{'forward':>10}{'and backward':>14}")
    records = []
    for shape in shapes:
        sizes = tuple(map(int, shape.split(",")))
        for gate in gates:
            for name, method in methods.items():
                memory = step_memory(method, problem(gate, sizes, dtype), sharding)
                records.append({"shape": sizes, "gates": gate, "method": name} | memory._asdict())
                print(
                    f"{sizes!s:26}{gate:8}{name:>9}{memory.forward_bytes / 1e6:10.1f}"
                    f"{memory.both_bytes / 1e6:14.1f}",
                    flush=True,
                )
    return records


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m linrec.benchmark.kernels", description=__doc__)
    add_arguments(parser)
    raise SystemExit(main(parser.parse_args()))
