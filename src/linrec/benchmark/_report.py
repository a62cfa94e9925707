"""What the reader sees: a progress bar, tables, JSON and plots.

`rich` and `matplotlib` are imported late, so that `--help` works without them.
"""

import contextlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, UTC
from pathlib import Path
from typing import Any

import jax

import linrec


MIB = 2**20


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr. Call what it gives with a description of each of `total` steps.

    Where stderr is no terminal but a file, it is one line for each step.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda description: print(description, file=sys.stderr, flush=True)
        return
    columns = (
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total + 1)

        def step(description: str) -> None:
            bar.update(task, description=description, advance=1)

        yield step


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], remarks: bool = True
) -> None:
    """The first column is text, the last one too if it holds `remarks`; the others are numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        wrap = remarks and i == len(columns) - 1
        numbers = i > 0 and not wrap
        table.add_column(column, justify="right" if numbers else "left", no_wrap=not wrap)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console()
    if not console.is_terminal:
        console.width = 150
    console.print(table)


def describe(forward: dict[str, Any], both: dict[str, Any]) -> str:
    """How right a contestant is, from the records of its two passes."""
    if forward["problem"] == both["problem"] and both["problem"]:
        return both["problem"]
    troubles = [f"{r['pass']} {r['problem']}" for r in (forward, both) if r["problem"]]
    if troubles:
        return "; ".join(troubles)
    return "not comparable" if both["error"] is None else f"right to {both['error']:.0e}"


def write_json(path: Path, command: str, records: Sequence[dict[str, Any]]) -> None:
    device = jax.devices()[0]
    document = {
        "command": command,
        "arguments": re.sub(r" --output \S+", "", " ".join(sys.argv[1:])),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "linrec": linrec.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "device": device.device_kind,
        "cpu_count": os.cpu_count(),
        "records": list(records),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")


def write_bars(
    path: Path,
    panels: dict[tuple[str, str], dict[str, dict[str, float]]],
    unit: str,
) -> None:
    """A grid of panels by (row, column); in each, for every group, a bar for every contestant.

    On a logarithmic scale: the contestants lie orders of magnitude apart.
    """
    from matplotlib.figure import Figure

    rows, columns = (list(dict.fromkeys(keys)) for keys in zip(*panels, strict=True))
    names = list(
        dict.fromkeys(n for panel in panels.values() for bars in panel.values() for n in bars)
    )
    figure = Figure(figsize=(1 + 4.5 * len(columns), 0.8 + 3 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            axes, panel = grid[i][j], panels[row, column]
            for n, name in enumerate(names):
                bars = {x: group[name] for x, group in enumerate(panel.values()) if name in group}
                places = [x + (n + 0.5) / len(names) * 0.8 - 0.4 for x in bars]
                axes.bar(places, list(bars.values()), 0.8 / len(names), color=f"C{n}", label=name)
            axes.set_xticks(range(len(panel)), list(panel))
            axes.set_title(f"{row}, {column}", fontsize=10)
            _style(axes, log_y=True)
            if j == 0:
                axes.set_ylabel(unit)
    handles, labels = grid[0][0].get_legend_handles_labels()
    ncols = min(len(names), 3 * len(columns))
    figure.legend(handles, labels, loc="outside lower center", ncols=ncols, frameon=False)
    _save(figure, path)


def write_row_of_bars(path: Path, title: str, bars: dict[str, float], unit: str) -> None:
    """One bar below the other, each with its name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1 + 0.25 * len(bars)), layout="constrained")
    axes = figure.subplots()
    drawn = axes.barh(list(bars), list(bars.values()))
    axes.bar_label(drawn, fmt="{:.2f}", padding=3, fontsize=8)
    axes.invert_yaxis()
    figure.suptitle(title, fontsize=10)
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def write_lines(
    path: Path, panels: dict[str, dict[str, dict[int, float]]], unit: str, log_y: bool
) -> None:
    """A row of panels; in each, lines over the number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1 + 4.5 * len(panels), 4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)
    for axes, (title, lines) in zip(grid[0], panels.items(), strict=True):
        for name, line in lines.items():
            axes.plot(list(line), list(line.values()), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda T, _: f"{T / 1024:g}k" if T >= 1024 else f"{T:g}")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("tokens")
        axes.set_ylabel(unit)
        _style(axes, log_y)
        axes.legend(frameon=False, fontsize=8)
    _save(figure, path)


def _style(axes: Any, log_y: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    if log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")
