"""Block sizes and warps."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Sizes of the blocks that programs work on, and warps per program.

    Block sizes are powers of two, 16 or more; those larger than a problem's size are cut down to it.
    """

    chunk: int = 64
    """Tokens that are worked on at once; a state is kept for each chunk."""
    walk_key: int = 64
    walk_value: int = 64
    """The tile of the state that a program of the walk over the chunks carries."""
    walk_warps: int = 4
    inner: int = 64
    """Channels that are summed over at once inside chunks."""
    output: int = 128
    """Channels of the output, or of the value's gradient, that a program works out."""
    output_warps: int = 4
    gradient: int = 64
    """Channels of the query's and the key's gradient that a program works out."""
    gradient_warps: int = 4
    stages: int = 2
    """Depth of the pipelines that load blocks."""
    decode_value: int = 32
    """Value channels of the state that a program of the decoding kernel carries."""
    decode_warps: int = 4

    def __post_init__(self):
        for name in ("chunk", "walk_key", "walk_value", "inner", "output", "gradient"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(
                    f"`linrec.KernelConfig({name}=...)` expects a power of two, 16 or more, but got "
                    f"{size}."
                )


def default_config(
    K: int, V: int, dtype: np.dtype, channel_gates: bool, compute_capability: int
) -> KernelConfig:
    """A pure function: no timing, the same choice everywhere."""
    del K, V, dtype, channel_gates, compute_capability
    return KernelConfig()


def fit(block: int, size: int) -> int:
    """The block for an axis of `size` entries: no larger than needed, 16 at least."""
    return min(block, max(16, 1 << (size - 1).bit_length()))
