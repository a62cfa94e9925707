"""`speed --scaling`: whether time grows as the number of tokens does, and no faster."""

import argparse

from ._cases import Case
from ._contestants import CHUNK_SCAN, linrec_method
from ._options import failed
from ._report import print_table, progress, write_json, write_lines
from .speed import measure


LENGTHS = (1024, 4096, 16384, 65536, 131072)


def main(args: argparse.Namespace) -> int:
    contestants = [CHUNK_SCAN, *map(linrec_method, args.methods)]
    B, _, H, K, V = args.shapes[-1]
    cases = [
        Case((B, T, H, K, V), g, d, args.normaliser)
        for d in args.dtypes
        for g in args.gates
        for T in LENGTHS
    ]
    records = []
    with progress(len(cases) * (2 + 2 * len(contestants))) as step:
        for case in cases:
            records += measure(case, contestants, args, step)
    write_json(args.output / "scaling.json", "scaling", records)

    lines, rows, panels = {}, [], {}
    for record in records:
        key = (record["dtype"], record["gate"], record["pass"], record["contestant"])
        lines.setdefault(key, {})[record["shape"][1]] = record
    for (dtype, gate, which, name), line in lines.items():
        per_token = {T: r["ms"] / T * 1e3 for T, r in line.items() if "ms" in r}
        row = [f"{name}, {gate}, {dtype}, {which}"]
        row += [f"{per_token[T]:.2f}" if T in per_token else "-" for T in LENGTHS]
        row += ["; ".join(f"{T}: {r['problem']}" for T, r in line.items() if r["problem"])]
        rows.append(row)
        panels.setdefault(f"{gate}, {dtype}", {})[f"{name}, {which}"] = per_token
    columns = ["µs per token", *(f"T = {T}" for T in LENGTHS), "answer"]
    print_table(f"B, H, K, V = {B}, {H}, {K}, {V}", columns, rows)
    write_lines(args.output / "scaling.png", panels, "µs per token", log_y=False)
    return failed(records)
