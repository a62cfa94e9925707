from collections.abc import Callable
from typing import TypeAlias

import jax
from jaxtyping import Array

from .._inputs import Inputs
from .._triton.call import is_available
from .base import AbstractMethod
from .chunked import Chunked
from .triton import Triton


Run: TypeAlias = Callable[[Inputs], tuple[Array, Array]]


class Auto(AbstractMethod):
    """The default. Chooses by a fixed rule.

    - [`linrec.Triton`][] in programs for CUDA or ROCm GPUs, where its kernels can be imported and
        support the inputs;
    - [`linrec.Chunked`][] everywhere else.

    What a program is for is known when it is lowered. One traced function can be run on a CPU and
    exported for a GPU.

    It chooses, it does not try: an error of the chosen method is the caller's to see.
    `python -m linrec` says what it would choose; methods of your own ask `Auto().select(inputs)`.
    """

    def select(self, inputs: Inputs, platform: str | None = None) -> AbstractMethod:
        """The method for `inputs`, which are as in [`linrec.AbstractMethod`][].

        `platform` defaults to that of `jax.default_backend()`.
        """
        platform = platform or jax.default_backend()
        has_kernels = platform in ("gpu", "cuda", "rocm") and is_available()
        if has_kernels and Triton().unsupported(inputs) is None:
            return Triton()
        return Chunked()

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        on_gpu, elsewhere = self.select(inputs, "gpu"), self.select(inputs, "cpu")
        if on_gpu == elsewhere:
            return elsewhere(inputs)
        return by_platform(on_gpu, elsewhere, inputs)


def by_platform(on_gpu: Run, elsewhere: Run, inputs: Inputs) -> tuple[Array, Array]:
    """Which of the two runs is decided when the program is lowered."""
    return jax.lax.platform_dependent(inputs, cuda=on_gpu, rocm=on_gpu, default=elsewhere)
