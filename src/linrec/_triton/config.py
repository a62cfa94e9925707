"""How kernels are launched: blocks and warps from a pure heuristic, and where they run."""

import dataclasses
from typing import Any, NamedTuple


# Key channels that a program of the decoding kernel can hold.
MAX_DECODE_KEY = 1024


class Walk(NamedTuple):
    """The walk over the chunks: the tile of the state that a program carries."""

    key: int = 64
    value: int = 64
    warps: int = 4
    stages: int = 2


class Pairs(NamedTuple):
    """Inside a chunk: channels that are summed over at once, and channels that a program writes."""

    inner: int = 64
    outer: int = 128
    warps: int = 8
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Block sizes and warps of the kernels.

    Block sizes are powers of two, 16 or more. Those larger than a problem are cut down to its size.

    **Arguments:**

    - `chunk`: tokens that are worked on at once. One state is kept for each chunk. Defaults to 64.
    - `walk`: of the walk over the chunks, a named tuple `(key, value, warps, stages)`: the tile of
        the state that a program carries. Defaults to `(64, 64, 4, 2)`.
    - `output`, `d_key`, `d_value`: inside a chunk, for the output, for the gradients of query, key
        and their gates, and for those of the value and its gates, named tuples `(inner, outer,
        warps, stages)`: channels that are summed over at once, and channels that a program writes.
        Default to `(64, 128, 8, 2)`.
    - `decode_value`: value channels of the state that a program of the decoding kernel carries.
        Defaults to 32.

    `linrec.KernelConfig(walk=linrec.KernelConfig.walk._replace(warps=8))` changes one number of a
    named tuple.
    """

    chunk: int = 64
    walk: Walk = Walk()  # noqa: RUF009
    output: Pairs = Pairs()  # noqa: RUF009
    d_key: Pairs = Pairs()  # noqa: RUF009
    d_value: Pairs = Pairs()  # noqa: RUF009
    decode_value: int = 32

    def __post_init__(self):
        blocks = {"chunk": self.chunk, "walk": self.walk[:2], "decode_value": self.decode_value}
        blocks |= {name: getattr(self, name)[:2] for name in ("output", "d_key", "d_value")}
        for name, sizes in blocks.items():
            for size in (sizes,) if isinstance(sizes, int) else sizes:
                if size < 16 or size & (size - 1):
                    raise ValueError(
                        f"`linrec.KernelConfig({name}=...)` expects powers of two, 16 or more, but "
                        f"got {size}."
                    )


def default_config(key_gates: bool, value_gates: bool, wide: bool) -> KernelConfig:
    """The largest blocks that compile without spilling registers, two programs to a processor.

    `key_gates` and `value_gates` say whether there are gates per channel, `wide` whether tensor
    cores get 32-bit operands. Heads of all sizes and GPUs from compute capability 80 on take the
    same blocks: what is larger than a block is looped over.
    """
    if wide:
        small = Pairs(inner=16, outer=32, warps=8, stages=1)
        smaller = Pairs(inner=16, outer=16, warps=8, stages=1)
        return KernelConfig(
            walk=Walk(32, 32),
            output=smaller if value_gates else small,
            d_key=smaller,
            d_value=smaller if value_gates else small,
        )
    if key_gates and value_gates:
        small = Pairs(inner=16, outer=16, warps=4, stages=1)
        output = Pairs(inner=32, outer=32, warps=4)
        return KernelConfig(walk=Walk(warps=8), output=output, d_key=small, d_value=small)
    if key_gates or value_gates:
        # Blocks that have gates in the channels that they write hold twice as much.
        gated = Pairs(inner=32, outer=32, warps=4, stages=1)
        plain = Pairs(inner=32, outer=64, warps=4, stages=1)
        return KernelConfig(
            walk=Walk(64, 32) if value_gates else Walk(warps=8),
            output=gated if value_gates else plain,
            d_key=gated,
            d_value=gated if value_gates else plain,
        )
    return KernelConfig(d_key=Pairs(inner=64, outer=32, warps=4))


def fit(block: int, size: int) -> int:
    """The block for an axis of `size` entries: no larger than needed, 16 at least."""
    return min(block, max(16, 1 << (size - 1).bit_length()))


class Launch(NamedTuple):
    """How and where kernels run. Hashable, known when a program is traced."""

    config: KernelConfig | None
    input_precision: str
    compute_capability: int
    interpret: bool

    def target(self, warps: int, stages: int) -> dict[str, Any]:
        return dict(
            warps=warps,
            stages=stages,
            compute_capability=self.compute_capability,
            interpret=self.interpret,
        )
