"""Writes what benchmarks found into `docs/benchmarks.md`: `python docs/results/tables.py`.

Takes every `*.json` beside this file, as `python -m linrec.benchmark --output docs/results` writes
them. Results from other environments go by names such as `speed-jla.json`.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


HERE = Path(__file__).parent
PAGE = HERE.parent / "benchmarks.md"
PLACE = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
MIB = 2**20

Records = list[dict[str, Any]]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def shape_text(shape: list[int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in zip("BTHKV", shape, strict=True))


def _cell(record: dict[str, Any] | None, key: str, scale: float, form: str) -> str:
    if record is None:
        return "-"
    problem, value = record["problem"], record.get(key)
    if problem is not None:
        return problem.partition(":")[0] if problem.startswith(("wrong", "fails")) else "-"
    return "?" if value is None else f"{value * scale:{form}}"


def by_contestant(records: Records, key: str, scale: float, form: str, what: str) -> Iterator[str]:
    """One table for each shape and dtype: contestants down, gates and passes across."""
    problems = dict.fromkeys((tuple(r["shape"]), r["dtype"]) for r in records)
    for shape, dtype in problems:
        chosen = {
            (r["contestant"], r["gate"], r["pass"]): r
            for r in records
            if (tuple(r["shape"]), r["dtype"]) == (shape, dtype)
        }
        contestants, gates, passes = map(dict.fromkeys, zip(*chosen, strict=True))
        header = [what]
        header += [f"`{gate}` {which.replace('+', ' + ')}" for gate in gates for which in passes]
        rows = [
            [name]
            + [_cell(chosen.get((name, g, p)), key, scale, form) for g in gates for p in passes]
            for name in contestants
        ]
        yield f"**{shape_text(shape)}, {dtype}**\n\n{table(header, rows)}"


def speed(records: Records) -> Iterator[str]:
    yield from by_contestant(records, "ms", 1, ",.1f", "ms")


def memory(records: Records) -> Iterator[str]:
    yield from by_contestant(records, "temp_bytes", 1 / MIB, ",.1f", "MiB")


def decode(records: Records) -> Iterator[str]:
    rows = [
        [
            r["name"],
            f"{r['seconds'] * 1e3:.2f}",
            f"{r['bandwidth'] / 1e9:.1f}",
            f"{r['of_copy']:.0%} (median {r['median_of_copy']:.0%})",
        ]
        for r in records
    ]
    first = records[0]
    what = f"{first['batch']} texts, {first['num_heads']} heads of {first['key_size']} x "
    yield table([what + str(first["value_size"]), "ms", "GB/s on the state", "of a copy"], rows)


def long(records: Records) -> Iterator[str]:
    rows = [
        [
            f"{r['length']:,} tokens, {r['how']}",
            f"{r['peak_bytes'] / MIB:,.0f}",
            f"{r['seconds']:.1f}",
            f"{r['length'] / r['seconds']:,.0f}",
            f"{r['gradient_error']:.0e}" if "gradient_error" in r else "-",
        ]
        for r in records
    ]
    first = records[0]
    what = f"{first['num_layers']} layers of `{first['mixer']}({first['size']})`"
    yield table([what, "peak MiB", "seconds", "tokens/s", "gradient against whole"], rows)


def kernels(records: Records) -> Iterator[str]:
    resources = [r for r in records if r["what"] == "resources" and r["K"] == 128]
    rows = [
        [
            f"`{r['kernel']}`, `{r['gate']}`, {r['target']}",
            *(str(r[key]) for key in ("registers", "spilled_bytes", "shared_bytes")),
            str(r["blocks_per_sm"]),
        ]
        for r in resources
        if r["target"] == "sm_90" and r["gate"] in ("none", "g", "gk")
    ]
    columns = ["registers", "spilled bytes", "shared bytes", "programs per processor"]
    yield table(["kernel, gate, GPU", *columns], rows)
    rows = [
        [
            f"`{r['gate']}`, {r['kernel']}",
            str(r["launches"]),
            f"{r['bytes_read'] / 1e6:.2f}",
            f"{r['bytes_written'] / 1e6:.2f}",
            f"{r['flops'] / 1e9:.3f}",
        ]
        for r in records
        if r["what"] == "work" and r["kernel"] in ("forward", "backward")
    ]
    yield table(["gate, pass", "launches", "MB read", "MB written", "GFLOP"], rows)


COMMANDS: dict[str, Callable[[Records], Iterator[str]]] = {
    command.__name__: command for command in (speed, memory, decode, long, kernels)
}


def results(command: str) -> str:
    parts = []
    for path in sorted(HERE.glob(f"{command}*.json")):
        document = json.loads(path.read_text())
        if document["command"] != command or path.stem.endswith("-growth"):
            continue
        parts += COMMANDS[command](document["records"])
        arguments = re.sub(r" --output \S+", "", document["arguments"])
        parts.append(
            f"Python {document['python']}, JAX {document['jax']}, {document['cpu_count']} cores, "
            f"{document['time'][:10]}: `python -m linrec.benchmark {arguments}`\n"
        )
    return "\n".join(["", *parts, ""]) if parts else ""


def fill(page: str) -> str:
    return PLACE.sub(lambda match: match[1] + results(match[2]) + match[3], page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
    print(f"wrote {PAGE}")
