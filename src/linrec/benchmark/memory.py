"""Temporary memory of the compiled programs, and how it grows with the sequence."""

import argparse
from collections.abc import Callable
from typing import Any

from . import _growth
from ._cases import Case
from ._check import Problem
from ._contestants import choose, Contestant
from ._options import add_case_options, cases, failed, memory_limit, PASSES
from ._report import describe, MIB, print_table, progress, write_bars, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_case_options(parser, [(1, 16384, 4, 64, 64)])
    _growth.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    contestants = choose(args.methods, args.peers)
    records = []
    with progress(len(cases(args)) * (1 + 2 * len(contestants))) as step:
        for case in cases(args):
            records += _measure(case, contestants, memory_limit(args), step)
            _print(case, records[-2 * len(contestants) :])
    write_json(args.output / "memory.json", "memory", records)
    panels = {}
    for record in records:
        panel = panels.setdefault((record["pass"], f"{record['shape']}, {record['dtype']}"), {})
        bars = panel.setdefault(record["gate"], {})
        if record["temp_bytes"] is not None:
            bars[record["contestant"]] = record["temp_bytes"] / MIB
    write_bars(args.output / "memory.png", panels, "temporary MiB")
    _growth.main(args)
    return failed(records)


def _measure(
    case: Case, contestants: list[Contestant], limit: float, step: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One record for each contestant and pass."""
    step(f"{case}: the right answers")
    problem = Problem.of(case)
    records = []
    for contestant in contestants:
        for which in PASSES:
            step(f"{case}: {contestant.name}, {which}")
            verdict = problem.judge(contestant, which, limit)
            program = verdict.program
            records.append(
                case._asdict()
                | {"contestant": contestant.name, "pass": which}
                | {"problem": verdict.problem, "error": verdict.error}
                | {"temp_bytes": None if program is None else program.temp_bytes}
            )
    return records


def _print(case: Case, records: list[dict[str, Any]]) -> None:
    rows = []
    for forward, both in zip(records[0::2], records[1::2], strict=True):
        row = [forward["contestant"]]
        for record in (forward, both):
            size = record["temp_bytes"]
            row.append("-" if size is None else f"{size / MIB:.1f}")
        rows.append([*row, describe(forward, both)])
    columns = ["contestant", *(f"{which} MiB" for which in PASSES), "answer"]
    print_table(f"{case}: temporary memory", columns, rows)
