"""Options that commands share."""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax

from ._cases import Case, DTYPES, GATES, NORMALISER, parse_shape, write_shapes
from ._contestants import linrec_method, METHODS
from ._peers import PEERS


PASSES = ("forward", "forward+backward")


def at_least(least: int) -> Callable[[str], int]:
    """Integers, for `argparse`."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected an integer of {least} or more, got {text!r}"
            )
        return int(text)

    return parse


def positive(text: str) -> float:
    """Numbers, for `argparse`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def folder(text: str) -> Path:
    """Made before anything is measured, for `argparse`."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def method(text: str) -> str:
    """A name that `linrec_method` knows, for `argparse`."""
    try:
        linrec_method(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(METHODS)}, with an integer as in chunked:128 or "
            f"segmented:4096, got {text!r} ({error})"
        ) from error
    return text


def refuse(message: object) -> NoReturn:
    """As `argparse` does, for arguments that do not go together."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def add_case_options(parser: argparse.ArgumentParser, shapes: Sequence[tuple[int, ...]]) -> None:
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parse_shape,
        default=shapes,
        metavar="B,T,H,K,V",
        help=f"(default: {write_shapes(shapes)})",
    )
    add_gates_option(parser, ["none", "g_gamma", "gk"])
    parser.add_argument(
        "--normaliser",
        type=positive,
        default=NORMALISER,
        help="what log_sigmoid(x) is divided by to give gates of tokens (default: %(default)g)",
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["float32"], help="(default: float32)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        type=method,
        default=["auto"],
        metavar="METHOD",
        help=f"of linrec: {', '.join(METHODS)}; with an integer as in chunked:128 or "
        "segmented:4096 (default: auto)",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=[peer.name for peer in PEERS],
        metavar="PEER",
        help="add what one would take instead, where installed: those named, or all of them: "
        f"{', '.join(peer.name for peer in PEERS)} (default: none of them)",
    )
    parser.add_argument(
        "--memory-limit",
        type=positive,
        metavar="GIB",
        help="leave out programs that need more (default: half of the device's memory)",
    )
    add_output_option(parser)


def add_gates_option(parser: argparse.ArgumentParser, gates: Sequence[str]) -> None:
    parser.add_argument(
        "--gates",
        nargs="+",
        choices=GATES,
        default=list(gates),
        help=f"(default: {' '.join(gates)})",
    )


def add_output_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=folder,
        default="benchmark-results",
        help="folder (default: %(default)s)",
    )


def cases(args: argparse.Namespace) -> list[Case]:
    return [
        Case(shape, gate, dtype, args.normaliser)
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
