from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
from jax.tree_util import default_registry
from jaxtyping import Array, Float, Int

from ._precision import wide_dtype


class RecurrentState(eqx.Module):
    """All that a recurrent layer remembers of the tokens it has seen.

    A pytree of arrays and nothing else, whose size does not depend on how many tokens there were:
    it stacks under `jax.vmap`, is written with `equinox.tree_serialise_leaves`, crosses
    `jax.export`, and its memory can be donated. With packed sequences every array has an axis
    `num_seqs` in front.
    """

    hidden: Float[Array, "*rows heads key value"]
    """The state of the recurrence, `(heads, key, value)`; float32, or float64 in such layers."""
    conv: Float[Array, "*rows history channels"] | None
    """The last inputs of the short convolution, `(conv_size - 1, channels)`; `None` without one."""
    position: Int[Array, "*rows"]
    """How many tokens it has seen."""

    @staticmethod
    def zeros(
        hidden: tuple[int, int, int], conv: tuple[int, int] | None, dtype: jnp.dtype
    ) -> "RecurrentState":
        """The state before the first token. `hidden` and `conv` are shapes."""
        return RecurrentState(
            jnp.zeros(hidden, wide_dtype(dtype)),
            None if conv is None else jnp.zeros(conv, dtype),
            jnp.zeros((), jnp.int32),
        )


def make_exportable(kind: type, example: Callable[[], Any]) -> None:
    """Lets programs that take or return such states be written by `jax.export` and read again.

    `example` makes one: all are alike in what a pytree is beside its arrays.
    """
    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=f"linrec.nn.{kind.__name__}",
        serialize_auxdata=lambda _: b"",
        deserialize_auxdata=lambda _: default_registry.flatten_one_level(example())[1],
    )


make_exportable(RecurrentState, lambda: RecurrentState.zeros((1, 1, 1), None, jnp.dtype("float32")))


def repeat_state(state, rows: int):
    """The same state for each of `rows` packed sequences."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), state)
