"""Who takes part, and under which name."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from jaxtyping import Array

import linrec

from ._baselines import chunk_scan, plain_scan
from ._cases import Case
from ._floor import CHUNK, chunk_floor
from ._programs import compile_jax, Inputs, Program


class Contestant(NamedTuple):
    """A way to compute the output of `linrec.recurrent` from its arguments."""

    name: str
    run: Callable[[Inputs], Array]
    unsupported: Callable[[Case], str | None] = lambda case: None
    """Why it cannot run a case, or `None` if it can."""
    build: Callable[[Callable, Inputs, Any], Program] = compile_jax
    same_maths: bool = True
    """Whether it is this recurrence that it computes, so that its answer can be checked."""
    module: str = "jax"
    """What has to be installed."""

    def installed(self) -> bool:
        return find_spec(self.module) is not None


# What the others are compared with.
BASELINE = Contestant("lax.scan", plain_scan)
CHUNK_SCAN = Contestant(
    "chunk scan",
    chunk_scan,
    lambda case: f"wants a multiple of {CHUNK} tokens" if case.length % CHUNK else None,
)
# No answer, but about what the chunk form costs at least.
FLOOR = Contestant("chunk floor", chunk_floor, CHUNK_SCAN.unsupported, same_maths=False)


METHODS: dict[str, Callable[..., linrec.AbstractMethod]] = {
    "auto": linrec.Auto,
    "chunked": linrec.Chunked,
    "scan": linrec.Scan,
    "segmented": linrec.Segmented,
    "triton": lambda: linrec.Triton(),  # whose first option is no integer
}


def linrec_method(text: str, chunk_size: int | None = None) -> Contestant:
    """`"chunked"` is `linrec.Chunked()`, `"chunked:128"` is `linrec.Chunked(128)`."""
    name, _, option = text.partition(":")
    if name not in METHODS:
        raise ValueError("there is no such method")
    method = METHODS[name](*([int(option)] if option else []))
    return Contestant(
        f"linrec {text}",
        lambda inputs: linrec.recurrent(**inputs, method=method, chunk_size=chunk_size)[0],
    )


def choose(methods: Sequence[str], peers: Sequence[str] | None) -> list[Contestant]:
    """`peers` are names, none for all of them, `None` for none of them."""
    chosen = [BASELINE, CHUNK_SCAN, FLOOR, *map(linrec_method, methods)]
    if peers is None:
        return chosen
    from ._peers import PEERS

    asked = [peer for peer in PEERS if not peers or peer.name in peers]
    missing = [peer.name for peer in asked if not peer.installed()]
    if missing:
        print(f"not installed: {', '.join(missing)}")
    return chosen + [peer for peer in asked if peer.installed()]
