"""`memory`, second part: what `chunk_size` leaves of the growth with the sequence.

Programs are compiled and not run: no arrays of these lengths are made.
"""

import argparse
from typing import Any

import jax

from ._cases import Case
from ._contestants import linrec_method
from ._options import at_least, cases
from ._programs import compile_jax
from ._report import MIB, print_table, progress, write_json, write_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        nargs="*",
        type=at_least(1),
        default=[2**n for n in range(14, 21)],
        metavar="T",
        help="at which growth is looked at, of the first of the methods (default: 16k to 1M)",
    )
    parser.add_argument(
        "--chunk-size",
        type=at_least(1),
        default=4096,
        help="at those lengths (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> None:
    lengths = sorted(args.lengths)
    if not lengths:
        return
    records, panels = [], {}
    with progress(len(cases(args)) * len(lengths)) as step:
        for case in cases(args):
            grown = []
            for T in lengths:
                step(f"{case}: {T} tokens")
                grown.append(_measure(case, T, args.methods[0], args.chunk_size))
            _print(case, grown)
            panels[f"{case.gate}, {case.dtype}"] = {
                name: {T: record[key] / MIB for T, record in zip(lengths, grown, strict=True)}
                for name, key in (
                    ("whole", "temp_bytes"),
                    (f"chunk_size={args.chunk_size}", "temp_bytes_in_pieces"),
                    ("its states", "state_bytes"),
                )
            }
            records += grown
    write_json(args.output / "growth.json", "growth", records)
    write_lines(args.output / "growth.png", panels, "temporary MiB", log_y=True)


def _measure(case: Case, T: int, method: str, chunk_size: int) -> dict[str, Any]:
    B, _, H, K, V = case.shape
    case = case._replace(shape=(B, T, H, K, V))
    inputs, cotangent = jax.eval_shape(lambda: (case.inputs(), case.cotangent()))
    whole = linrec_method(method)
    in_pieces = linrec_method(method, chunk_size)
    return case._asdict() | {
        "chunk_size": chunk_size,
        "temp_bytes": compile_jax(whole.run, inputs, cotangent).temp_bytes,
        "temp_bytes_in_pieces": compile_jax(in_pieces.run, inputs, cotangent).temp_bytes,
        "state_bytes": -(-T // chunk_size) * B * H * K * V * 4,
    }


def _print(case: Case, records: list[dict[str, Any]]) -> None:
    rows = []
    previous = None
    for record in records:
        T = record["shape"][1]
        rest = record["temp_bytes_in_pieces"] - record["state_bytes"]
        per_token = "-" if previous is None else f"{(rest - previous[1]) / (T - previous[0]):.1f}"
        sizes = (record["temp_bytes"], record["temp_bytes_in_pieces"], record["state_bytes"], rest)
        rows.append([str(T), *(f"{size / MIB:.1f}" for size in sizes), per_token])
        previous = (T, rest)
    pieces = f"chunk_size={records[0]['chunk_size']}"
    columns = ["tokens", "whole MiB", f"{pieces} MiB", "its states", "the rest", "bytes per token"]
    print_table(f"{case}: forward+backward, temporary memory", columns, rows, remarks=False)
