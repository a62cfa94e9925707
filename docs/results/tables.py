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


def _cell(record: dict[str, Any] | None, text: Callable[[dict[str, Any]], str]) -> str:
    if record is None:
        return "-"
    problem = record["problem"]
    if problem is not None:
        return problem.partition(":")[0] if problem.startswith(("wrong", "fails")) else "-"
    return text(record)


def by_contestant(
    records: Records, text: Callable[[dict[str, Any]], str], what: str
) -> Iterator[str]:
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
            [name] + [_cell(chosen.get((name, g, p)), text) for g in gates for p in passes]
            for name in contestants
        ]
        yield f"**{shape_text(shape)}, {dtype}**\n\n{table(header, rows)}"


def speed(records: Records) -> Iterator[str]:
    def text(record: dict[str, Any]) -> str:
        ratio = record.get("times_as_fast")
        return f"{record['ms']:,.1f}" + ("" if ratio is None else f" ({ratio:.1f}x)")

    yield from by_contestant(records, text, "ms (times as fast as `lax.scan`)")


def scaling(records: Records) -> Iterator[str]:
    lines, lengths = {}, dict.fromkeys(r["shape"][1] for r in records)
    for r in records:
        name = f"{r['contestant']}, `{r['gate']}`, {r['pass'].replace('+', ' + ')}"
        lines.setdefault(name, {})[r["shape"][1]] = f"{r['ms'] / r['shape'][1] * 1e3:.1f}"
    rows = [[name, *(line[T] for T in lengths)] for name, line in lines.items()]
    yield table(["µs for each token", *(f"{T:,} tokens" for T in lengths)], rows)


def memory(records: Records) -> Iterator[str]:
    def text(record: dict[str, Any]) -> str:
        size = record["temp_bytes"]
        return "?" if size is None else f"{size / MIB:,.1f}"

    yield from by_contestant(records, text, "MiB")


def growth(records: Records) -> Iterator[str]:
    lines, lengths = {}, dict.fromkeys(r["shape"][1] for r in records)
    for r in records:
        T, pieces = r["shape"][1], f"`chunk_size={r['chunk_size']}`"
        sizes = {"whole": r["temp_bytes"], pieces: r["temp_bytes_in_pieces"]}
        sizes[f"{pieces}, its states aside"] = r["temp_bytes_in_pieces"] - r["state_bytes"]
        for name, size in sizes.items():
            line = lines.setdefault(f"`{r['gate']}`, {name}", {})
            line[T] = f"{size / MIB:,.1f}"
    rows = [[name, *(line[T] for T in lengths)] for name, line in lines.items()]
    yield table(["MiB", *(f"{T:,} tokens" for T in lengths)], rows)


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
    resources = [r for r in records if r["what"] == "resources"]
    work = {(r["gate"], r["kernel"]): r for r in records if r["what"] == "work"}
    steps = [r for r in records if r["what"] == "training_step"]
    yield from _kernels_by_gate(resources)
    yield from _kernels_by_target(resources)

    rows = []
    for gate in dict.fromkeys(gate for gate, _ in work):
        row = [f"`{gate}`"]
        for which in ("forward", "backward"):
            r = work[gate, which]
            moved = (r["bytes_read"] + r["bytes_written"]) / 1e6
            row += [str(r["launches"]), f"{moved:.2f}", f"{r['flops'] / 1e9:.3f}"]
        rows.append(row)
    header = [
        f"{which}{what}" for which in ("forward: ", "backward: ")
        for what in ("launches", "MB read and written", "GFLOP")
    ]  # fmt: skip
    yield table(["gate", *header], rows)

    methods = dict.fromkeys(r["method"] for r in steps)
    memory = {(tuple(r["shape"]), r["gate"], r["method"]): r for r in steps}
    for shape in dict.fromkeys(tuple(r["shape"]) for r in steps):
        rows = [
            [f"`{gate}`"]
            + [
                f"{memory[shape, gate, name][key] / 1e6:,.1f}"
                for name in methods for key in ("forward_bytes", "both_bytes")
            ]
            for gate in dict.fromkeys(r["gate"] for r in steps)
        ]  # fmt: skip
        header = [f"{name} {which}" for name in methods for which in ("forward", "with backward")]
        yield f"**Temporaries at {shape_text(shape)}, MB**\n\n{table(['gate', *header], rows)}"


def _kernels_by_gate(resources: Records) -> Iterator[str]:
    chosen = {
        (r["gate"], r["kernel"]): f"{r['registers']} ({r['blocks_per_sm']})"
        for r in resources
        if r["target"] == "sm_90" and r["K"] == 128
    }
    gates, names = map(dict.fromkeys, zip(*chosen, strict=True))
    rows = [[f"`{gate}`", *(chosen[gate, name] for name in names)] for gate in gates]
    header = "sm_90, 128 channels: registers (programs per processor)"
    yield table([header, *(f"`{name}`" for name in names)], rows)


def _kernels_by_target(resources: Records) -> Iterator[str]:
    sizes = dict.fromkeys(r["K"] for r in resources)
    rows = []
    for target in dict.fromkeys(r["target"] for r in resources):
        here = [r for r in resources if r["target"] == target]
        spilled = [max(r["spilled_bytes"] for r in here if r["K"] == K) for K in sizes]
        inside = [r for r in here if r["kernel"] in ("output", "d_key", "d_value")]
        rows.append([
            target,
            " / ".join(map(str, spilled)),
            f"{max(r['shared_bytes'] for r in here) / 1024:.0f}",
            str(min(r["blocks_per_sm"] for r in inside)),
            str(min(r["tensor_core_instructions"] for r in here if r["kernel"] != "decode")),
        ])  # fmt: skip
    yield table(
        [
            "all gates",
            f"spilled bytes at most, at {' / '.join(map(str, sizes))} channels",
            "shared KiB at most",
            "programs per processor inside chunks, at least",
            "tensor-core instructions at least",
        ],
        rows,
    )


COMMANDS: dict[str, Callable[[Records], Iterator[str]]] = {
    command.__name__: command for command in (speed, scaling, memory, growth, decode, long, kernels)
}


def results(command: str) -> str:
    parts = []
    for path in sorted(HERE.glob(f"{command}*.json")):
        document = json.loads(path.read_text())
        if document["command"] != command:
            continue
        parts.append(
            f"Python {document['python']}, JAX {document['jax']}, {document['cpu_count']} cores, "
            f"{document['time'][:10]}: `python -m linrec.benchmark {document['arguments']}`\n"
        )
        parts += COMMANDS[command](document["records"])
    return "\n".join(["", *parts, ""]) if parts else ""


def fill(page: str) -> str:
    return PLACE.sub(lambda match: match[1] + results(match[2]) + match[3], page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
    print(f"wrote {PAGE}")
