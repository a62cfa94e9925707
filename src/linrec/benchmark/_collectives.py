"""What a compiled program sends from device to device."""

import math
import re
from typing import NamedTuple


_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_OPERATION = re.compile(rf"= (\(.*?\)|\S+) ({'|'.join(_KINDS)})(?:-start)?\(")
_START, _DONE = (re.compile(rf" (?:{'|'.join(_KINDS)})-{end}\(") for end in ("start", "done"))
_NAME = re.compile(r"%[\w.-]+")
_ARRAY = re.compile(r"\b(pred|bf16|[fsu]\d+)\[([\d,]*)\]")


class Collective(NamedTuple):
    kind: str
    received_bytes: int
    """By one device."""


def collectives(text: str, devices: int) -> list[Collective]:
    """Of a program for a ring of so many devices, as `compiled.as_text()` writes it."""
    return [
        Collective(kind, round(_share(kind, devices) * sum(map(_bytes, _ARRAY.findall(shapes)))))
        for shapes, kind in _OPERATION.findall(text)
    ]


def received_bytes(text: str, devices: int) -> int:
    return sum(collective.received_bytes for collective in collectives(text, devices))


def waiting(text: str) -> list[str]:
    """The instructions that need, if indirectly, what other devices send.

    Of the main computation of a program that is scheduled: in order of time.
    """
    names, lines = set(), []
    for line in text[text.index("\nENTRY") :].splitlines():
        name, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        if _OPERATION.search(line) or names.intersection(_NAME.findall(rest)):
            names.add(name)
            lines.append(line)
    return lines


def meanwhile(text: str) -> list[str]:
    """The instructions that are scheduled while messages are under way."""
    started, lines = 0, []
    for line in text[text.index("\nENTRY") :].splitlines():
        started += len(_START.findall(line)) - len(_DONE.findall(line))
        if started > 0:
            lines.append(line)
    return lines


def _share(kind: str, devices: int) -> float:
    """Of the result, how much a device gets from others."""
    match kind:
        case "all-gather" | "all-to-all":
            return (devices - 1) / devices
        case "all-reduce":  # every part goes around twice: to be summed, and to be spread
            return 2 * (devices - 1) / devices
        case "reduce-scatter":
            return devices - 1
    return 1.0


def _bytes(array: tuple[str, str]) -> int:
    dtype, shape = array
    bits = int(re.sub(r"\D", "", dtype) or 8)  # of a `pred`, 8
    return bits // 8 * math.prod(int(size) for size in shape.split(",") if size)
