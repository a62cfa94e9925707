import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, Int, PyTree

from .._inputs import Inputs


def expect_method(argument: str, method: Any) -> None:
    if not isinstance(method, AbstractMethod):
        hint = f" Did you mean `linrec.{method.__name__}()`?" if isinstance(method, type) else ""
        raise ValueError(
            f"`{argument}` expects a method, an instance of `linrec.AbstractMethod` such as "
            f"`linrec.Auto()` or `linrec.Scan()`, but got {method!r}.{hint}"
        )


class AbstractMethod(eqx.Module):
    """A way to run the recurrence. Small, immutable, carries its own options.

    To write one, subclass it and define `__call__`.
    """

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
        """Runs the recurrence on inputs in canonical form. It is called under `jax.jit`.

        **Arguments:** `inputs`, a module with the arguments of [`linrec.recurrent`][], checked,
        batched and with their defaults filled in. A row of the batch holds `num_seqs` sequences:
        one without `cu_seqlens`, else those packed along `seq`.

        - `q`, `k`, `v`: as `query`, `key` and `value`.
        - `g`, `gk`, `gv`: `(batch, seq, heads)`, `(batch, seq, heads, key)` and
            `(batch, seq, heads, value)`, or `None`. A `g` per key channel has become a part of
            `gk`.
        - `g_gamma`: `(batch, num_seqs, heads)`, or `None`.
        - `scale`: `(batch,)`.
        - `initial_state`: `(batch, num_seqs, heads, key, value)`, float32 or float64.
        - `cu_seqlens`: `(num_seqs + 1,)` boundaries, or `None`.
        - `reverse`: `True` or `False`.

        **Returns:** the output, `(batch, seq, heads, value)` in the dtype of `v`, and the final
        states, of the shape and dtype of `initial_state`.
        """

    def unsupported(self, inputs: Inputs) -> str | None:
        """Why this method cannot run `inputs`, as in `__call__`, or `None` if it can."""
        del inputs
        return None

    def in_pieces(self, chunk_size: int) -> "AbstractMethod":
        """The same in bounded memory, see [`linrec.Segmented`][]."""
        from .segmented import Segmented  # which is a method itself

        return Segmented(chunk_size, self)

    def run_layer(
        self, layer: Any, x: Array, state: PyTree, cu_seqlens: Int[Array, " boundaries"] | None
    ) -> tuple[Array, PyTree]:
        """`layer.run` with this method for the recurrences of the layer."""
        from ..nn._timeline import sequence_timeline  # layers are built on methods

        return layer.run(x, state, sequence_timeline(x.shape[0], cu_seqlens, self))
