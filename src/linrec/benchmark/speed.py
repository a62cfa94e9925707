"""Time of the forward pass, and of forward and backward together."""

import argparse
from typing import Any

from ._cases import Case, SHAPES
from ._check import Problem
from ._contestants import BASELINE, choose, Contestant
from ._options import add_case_options, at_least, cases, failed, memory_limit, PASSES, positive
from ._report import describe, print_table, progress, write_bars, write_json
from ._timing import interleave


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_case_options(parser, SHAPES)
    parser.add_argument(
        "--repeats", type=at_least(1), default=10, help="rounds (default: %(default)s)"
    )
    parser.add_argument(
        "--budget",
        type=positive,
        default=10.0,
        metavar="SECONDS",
        help="for each program; slow ones repeat less, twice at least (default: %(default)s)",
    )
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="instead: time per token from 1k to 128k tokens, of linrec and the chunk scan",
    )


def main(args: argparse.Namespace) -> int:
    if args.scaling:
        from ._scaling import main

        return main(args)
    contestants = choose(args.methods, args.peers)
    records = []
    with progress(len(cases(args)) * (2 + 2 * len(contestants))) as step:
        for case in cases(args):
            records += measure(case, contestants, args, step)
            _print(case, records[-len(contestants) * 2 :])
    write_json(args.output / "speed.json", "speed", records)
    for dtype in args.dtypes:
        _plot(args.output / f"speed-{dtype}.png", [r for r in records if r["dtype"] == dtype])
    return failed(records)


def measure(case: Case, contestants: list[Contestant], args, step) -> list[dict[str, Any]]:
    """One record for each contestant and pass."""
    step(f"{case}: the right answers")
    problem = Problem.of(case)
    verdicts = {}
    for contestant in contestants:
        for which in PASSES:
            step(f"{case}: {contestant.name}, {which}")
            verdicts[which, contestant.name] = problem.judge(contestant, which, memory_limit(args))
    step(f"{case}: timing")
    timings = {}
    for which in PASSES:
        calls = {
            key: verdict.program.call
            for key, verdict in verdicts.items()
            if key[0] == which and verdict.program is not None
        }
        timings |= interleave(calls, args.repeats, args.budget)
    records = []
    for (which, name), (program, error, trouble) in verdicts.items():
        record = case._asdict() | {"contestant": name, "pass": which}
        record |= {"problem": trouble, "error": error}
        if program is not None:
            timing = timings[which, name]
            record |= {
                "ms": timing.minimum * 1e3,
                "ms_median": timing.median * 1e3,
                "ms_samples": [seconds * 1e3 for seconds in timing.samples],
                "compile_seconds": program.compile_seconds,
                "temp_bytes": program.temp_bytes,
            }
            if (which, BASELINE.name) in timings:
                record["times_as_fast"] = timings[which, BASELINE.name].minimum / timing.minimum
        records.append(record)
    return records


def _print(case: Case, records: list[dict[str, Any]]) -> None:
    def number(record, key, form):
        return form.format(record[key]) if record.get(key) is not None else "-"

    columns = ["contestant"]
    for which in PASSES:
        columns += [f"{which} ms", "(median)", "ratio", "compile s"]
    rows = []
    for forward, both in zip(records[0::2], records[1::2], strict=True):
        row = [forward["contestant"]]
        for record in (forward, both):
            row += [number(record, "ms", "{:.1f}"), number(record, "ms_median", "({:.1f})")]
            row += [number(record, "times_as_fast", "{:.2f}")]
            row += [number(record, "compile_seconds", "{:.1f}")]
        row.append(describe(forward, both))
        rows.append(row)
    print_table(f"{case}; ratio: times as fast as {BASELINE.name}", [*columns, "answer"], rows)


def _plot(path, records: list[dict[str, Any]]) -> None:
    panels = {}
    for record in records:
        panel = panels.setdefault((record["pass"], str(record["shape"])), {})
        bars = panel.setdefault(record["gate"], {})
        if "ms" in record:
            bars[record["contestant"]] = record["ms"]
    write_bars(path, panels, "ms")
