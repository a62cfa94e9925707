import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from .._inputs import Inputs
from .._types import CuSeqlens


def expect_method(argument: str, method: Any) -> None:
    if not isinstance(method, AbstractMethod):
        hint = f" Did you mean `linrec.{method.__name__}()`?" if isinstance(method, type) else ""
        raise ValueError(
            f"`{argument}` expects one of `linrec.Auto()`, `linrec.Scan()`, `linrec.Chunked()`, "
            "`linrec.Triton()`, `linrec.Segmented(...)`, `linrec.SequenceParallel(...)`, but got "
            f"{method!r}.{hint}"
        )


class AbstractMethod(eqx.Module):
    """A way to run the recurrence. Small, immutable, carries its own options."""

    @property
    def has_forward_mode(self) -> bool:
        """Whether `jax.jvp` works. Reverse mode always does."""
        return False

    @abc.abstractmethod
    def __call__(
        self, inputs: Inputs
    ) -> tuple[
        Float[Array, "batch seq heads value"], Float[Array, "batch num_seqs heads key value"]
    ]:
        """Runs the recurrence on inputs in canonical form.

        **Returns:** the output, in the value's dtype, and the final states, in the state's dtype.
        """

    def unsupported(self, inputs: Inputs) -> str | None:
        """Why this method cannot run `inputs`, or `None` if it can."""
        del inputs
        return None

    def in_pieces(self, chunk_size: int) -> "AbstractMethod":
        """The same in bounded memory, see [`linrec.Segmented`][]."""
        from .segmented import Segmented  # which is a method itself

        return Segmented(chunk_size, self)

    def run_layer(
        self, layer: Any, x: Array, state: PyTree, cu_seqlens: CuSeqlens | None
    ) -> tuple[Array, PyTree]:
        """`layer.run` with this method for the recurrences of the layer."""
        from ..nn._timeline import sequence_timeline  # layers are built on methods

        return layer.run(x, state, sequence_timeline(x.shape[0], cu_seqlens, self))
