"""Options that commands share."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from ._cases import Case, DTYPES, GATES, parse_shape


PASSES = ("forward", "forward+backward")


def add_case_options(parser: argparse.ArgumentParser, shapes: Sequence[tuple[int, ...]]) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        default=shapes,
        metavar="B,T,H,K,V",
        help=f"default: {' '.join(','.join(map(str, shape)) for shape in shapes)}",
    )
    parser.add_argument("--gates", nargs="+", choices=GATES, default=["none", "g_gamma", "gk"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["auto"],
        metavar="METHOD",
        help="of linrec, with an option if need be: chunked, chunked:128, scan (default: auto)",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="PEER",
        help="add what one would take instead, where installed: those named, or all of them",
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="leave out programs that need more (default: half of the device's memory)",
    )
    add_output_option(parser)


def add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("benchmark-results"),
        help="folder (default: %(default)s)",
    )


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(shape, gate, dtype)
        for shape in args.shapes
        for dtype in args.dtypes
        for gate in args.gates
    ]


def memory_limit(args: argparse.Namespace) -> float:
    """In bytes."""
    if args.memory_limit is not None:
        return args.memory_limit * 2**30
    stats = jax.devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] / 2
    if "SC_PHYS_PAGES" in os.sysconf_names:  # not on Windows
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    return float("inf")


def failed(records: Sequence[dict[str, Any]]) -> int:
    """The exit status: whether linrec itself was wrong, or did not run."""
    return int(any(r["contestant"].startswith("linrec ") and r["problem"] for r in records))
