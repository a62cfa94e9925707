import equinox as eqx
import jax
from jaxtyping import PyTree

from ._layer import AbstractMixer


def trainable(tree: PyTree) -> PyTree[bool]:
    """Which leaves of a layer, of a model, or of whatever holds layers are parameters.

    Arrays of floats are, except for the states that layers hold, unless they were made with
    `trainable_state=True`, and for what layers hold fixed: `LightningAttention.decay` and
    `HGRN2.lower_bound`. Their gradients are zero, but an optimiser with weight decay would shrink
    them all the same, and keep its own numbers for them.

    !!! example

        ```python
        import equinox as eqx
        import jax
        import linrec

        layer = linrec.nn.HGRN2(128, key=jax.random.key(0))
        parameters, rest = eqx.partition(layer, linrec.nn.trainable(layer))
        ```

    **Arguments:** `tree`, any pytree.

    **Returns:** a tree of the same structure, of `True` and `False`: a filter for
    `equinox.partition` and `equinox.filter`, a mask for optax.
    """

    def is_part(x):
        return isinstance(x, AbstractMixer) and x is not tree

    def of_part(x):
        return trainable(x) if is_part(x) else eqx.is_inexact_array(x)

    mask = jax.tree.map(of_part, tree, is_leaf=is_part)
    if not isinstance(tree, AbstractMixer):
        return mask
    names = tree.fixed if tree.trainable_state else ("state", *tree.fixed)
    return eqx.tree_at(
        lambda mixer: jax.tree.leaves([getattr(mixer, name) for name in names]),
        mask,
        replace_fn=lambda _: False,
    )
