"""Training a model on one long sequence: peak memory and time, in chunks and whole.

Every measurement runs in a process of its own, whose peak resident memory is what is reported.
"""

import argparse
import multiprocessing
import resource
import sys
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import linrec

from ._options import add_output_option, at_least, refuse
from ._report import print_table, progress, write_json, write_lines


# Those that need no more than a size.
MIXERS = (
    "GatedLinearAttention",
    "HGRN2",
    "LinearAttention",
    "Mamba2",
    "Retention",
    "SimpleGatedLinearAttention",
)
VOCAB = 256


class Task(NamedTuple):
    mixer: str
    size: int
    num_layers: int
    length: int
    chunk_size: int | None
    two_level: bool

    def __str__(self) -> str:
        if self.chunk_size is None:
            return "whole"
        return f"chunks of {self.chunk_size}" + (", two levels" if self.two_level else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    integers: dict[str, Any] = {"type": at_least(1), "metavar": "N"}
    parser.add_argument(
        "--mixer",
        choices=MIXERS,
        default="SimpleGatedLinearAttention",
        help="(default: %(default)s)",
    )
    parser.add_argument("--size", default=256, help="channels (default: %(default)s)", **integers)
    parser.add_argument("--num-layers", default=4, help="(default: %(default)s)", **integers)
    parser.add_argument("--chunk-size", default=1024, help="(default: %(default)s)", **integers)
    parser.add_argument("--two-level", action="store_true", help="checkpoints on two levels")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=at_least(1),
        default=[4096, 16384, 65536, 1_000_000],
        metavar="T",
        help="tokens of the sequence (default: 4096 16384 65536 1000000)",
    )
    parser.add_argument(
        "--whole-up-to",
        type=at_least(0),
        default=16384,
        metavar="T",
        help="also run sequences of up to this length whole (default: %(default)s)",
    )
    add_output_option(parser)


def main(args: argparse.Namespace) -> None:
    tasks = [
        Task(args.mixer, args.size, args.num_layers, length, chunk_size, args.two_level)
        for length in args.lengths
        for chunk_size in (None, args.chunk_size)
        if chunk_size is not None or length <= args.whole_up_to
    ]
    try:
        eqx.filter_eval_shape(_make_model, tasks[0])
    except ValueError as error:  # a size that the mixer cannot have
        refuse(f"argument --size: {error}")
    records, lines, of_whole = [], {}, {}
    with progress(len(tasks)) as step:
        for task in tasks:
            step(f"{task.length:,} tokens, {task}")
            record, gradient = _in_new_process(task)
            if task.chunk_size is None:
                of_whole[task.length] = gradient
            elif task.length in of_whole:
                record["gradient_error"] = _relative_error(gradient, of_whole[task.length])
            records.append({**task._asdict(), "how": str(task), **record})
            lines.setdefault(str(task), {})[task.length] = record["peak_bytes"] / 2**20
    _print(args, records)
    write_json(args.output / "long.json", "long", records)
    write_lines(args.output / "long.png", {args.mixer: lines}, "peak MiB", log_y=True)


def _print(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    rows = [
        (
            f"{record['length']:,} tokens",
            f"{record['peak_bytes'] / 2**20:,.0f}",
            f"{record['seconds']:.1f}",
            f"{record['length'] / record['seconds']:,.0f}",
            f"{record['gradient_error']:.0e}" if "gradient_error" in record else "-",
            record["how"],
        )
        for record in records
    ]
    columns = ("sequence", "peak MiB", "seconds", "tokens/s", "gradient against whole", "how")
    title = (
        f"Loss and gradient of a model of {args.num_layers} layers of {args.mixer}({args.size}), "
        "peak resident memory"
    )
    print_table(title, columns, rows)


def _in_new_process(task: Task) -> tuple[dict[str, Any], list[np.ndarray]]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (task,))


def _make_model(task: Task) -> linrec.nn.LanguageModel:
    kind = getattr(linrec.nn, task.mixer)
    return linrec.nn.LanguageModel(
        lambda layer_idx, key: kind(task.size, key=key),
        task.num_layers,
        VOCAB,
        key=jax.random.key(0),
    )


def _measure(task: Task) -> tuple[dict[str, Any], list[np.ndarray]]:
    model = _make_model(task)
    tokens = jax.random.randint(jax.random.key(1), (task.length + 1,), 0, VOCAB, jnp.int32)

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def gradient(model, tokens):
        xs, loss = (tokens[:-1], tokens[1:]), lambda xs, state: model.loss(*xs, state)
        if task.chunk_size is None:
            total, _ = loss(xs, model.initial_state())
        else:
            total, _ = linrec.scan_chunks(
                loss, xs, model.initial_state(), task.chunk_size, two_level=task.two_level
            )
        return total / task.length

    compiled = gradient.lower(model, tokens).compile()  # pyright: ignore[reportFunctionMemberAccess]
    start = time.perf_counter()
    loss, gradients = jax.block_until_ready(compiled(model, tokens))
    seconds = time.perf_counter() - start
    # Kilobytes, but bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    record = {"peak_bytes": peak, "seconds": seconds, "loss": float(loss)}
    return record, [np.asarray(leaf) for leaf in jax.tree.leaves(gradients)]


def _relative_error(actual: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """Root mean square, over all parameters."""
    difference = sum(np.sum((a - b) ** 2) for a, b in zip(actual, expected, strict=True))
    return float(np.sqrt(difference / sum(np.sum(b**2) for b in expected)))
