import abc

import equinox as eqx
from jaxtyping import Array, Float

from .._inputs import Inputs


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
