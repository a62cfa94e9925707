"""Time, on a machine that is never quiet."""

import statistics
import time
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar


Name = TypeVar("Name", bound=Hashable)


class Timing(NamedTuple):
    """Seconds. The minimum is the least disturbed by others on the machine."""

    samples: list[float]

    @property
    def minimum(self) -> float:
        return min(self.samples)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


# Seconds. Short calls are repeated within a turn, since the first finds the caches of another.
_TURN = 0.05


def interleave(
    calls: dict[Name, Callable[[], object]], rounds: int, budget: float
) -> dict[Name, Timing]:
    """Times calls in turns, so that a noisy moment hits all of them alike.

    A call that has taken `budget` seconds sits out the remaining rounds, but not the first two.
    Calls have to be warm, and run to the end before they return.
    """
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            if i >= 2 and sum(samples[name]) > budget:
                continue
            turn = 0.0
            while turn < _TURN:
                start = time.perf_counter()
                call()
                samples[name].append(time.perf_counter() - start)
                turn += samples[name][-1]
    return {name: Timing(seconds) for name, seconds in samples.items()}
