from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from .._inputs import count
from .._method.base import AbstractMethod
from .._types import CuSeqlens
from .._varlen import is_token
from ._block import Block
from ._layer import AbstractLayer, AbstractMixer
from ._linear import Init, make_linear
from ._precision import wide_dtype
from ._timeline import AbstractTimeline


class LanguageModel(AbstractLayer):
    """Embedding, a stack of blocks, norm, head: from tokens to the logits of the next one.

    The stack runs as a `jax.lax.scan` over its shortest repeating pattern of blocks, so that
    compile time does not grow with depth. In a hybrid model the pattern is a few blocks long.

    !!! example

        ```python
        import jax
        import linrec

        def make_mixer(layer_idx, key):
            if layer_idx % 4 == 3:  # softmax attention in every fourth layer
                return linrec.nn.SlidingWindowAttention(64, window=32, key=key)
            return linrec.nn.GatedLinearAttention(64, key=key)

        model = linrec.nn.LanguageModel(make_mixer, 8, vocab_size=256, key=jax.random.key(0))
        logits, state = model(jax.numpy.arange(100))         # (100, 256)
        logits, state = model.step(jax.numpy.array(7), state)  # (256,)
        ```
    """

    embedding: eqx.nn.Embedding
    pattern: tuple[Block, ...]
    """One block for each place in the pattern, its arrays stacked over the repetitions."""
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None
    """`None` if the head is tied to the embedding."""
    checkpoint: bool = eqx.field(static=True)

    def __init__(
        self,
        make_mixer: Callable[[int, PRNGKeyArray], AbstractMixer],
        num_layers: int,
        vocab_size: int,
        *,
        mlp_size: int | None = None,
        tie_head: bool = True,
        checkpoint: bool = False,
        dtype: Any = None,
        init: Init | None = None,
        key: PRNGKeyArray,
    ):
        """**Arguments:**

        - `make_mixer`: `make_mixer(layer_idx, key)` makes the mixer of a layer, counted from 0.
        - `num_layers`: how many blocks.
        - `vocab_size`: how many different tokens.
        - `mlp_size`: as in [`linrec.nn.Block`][].
        - `tie_head`: whether the head is the embedding, transposed.
        - `checkpoint`: whether the backward pass computes every block again from its input, instead
            of keeping what is inside: less memory, for one forward pass more.
        - `dtype`: of all parameters but those of the mixers.
        - `init`: as in [`linrec.nn.GatedLinearAttention`][], for the MLPs and the head.
        - `key`: for everything, the mixers included.
        """
        if isinstance(make_mixer, AbstractLayer):
            raise TypeError(
                "`LanguageModel(make_mixer, ...)` expects a function that makes a mixer for each "
                f"layer, but got a layer, {type(make_mixer).__name__}."
            )
        num_layers = count("`LanguageModel(..., num_layers=...)`", num_layers)
        vocab_size = count("`LanguageModel(..., vocab_size=...)`", vocab_size)
        embedding_key, head_key, *keys = jax.random.split(key, 2 + 2 * num_layers)
        blocks = [
            Block(
                make_mixer(layer_idx, keys[2 * layer_idx]),
                mlp_size=mlp_size,
                dtype=dtype,
                init=init,
                key=keys[2 * layer_idx + 1],
            )
            for layer_idx in range(num_layers)
        ]
        sizes = [block.token_shape for block in blocks]
        if len(set(sizes)) > 1:
            raise ValueError(
                "`LanguageModel(make_mixer, ...)` expects mixers of one size, but they have "
                f"{[size for (size,) in sizes]}."
            )
        (size,) = sizes[0]
        period = _period(blocks)
        self.pattern = tuple(_stack(blocks[place::period]) for place in range(period))
        # Of a size that keeps the logits of a tied head small at first.
        weight = jax.random.normal(embedding_key, (vocab_size, size), dtype) * size**-0.5
        self.embedding = eqx.nn.Embedding(weight=weight)
        self.norm = eqx.nn.RMSNorm(size, use_bias=False, dtype=dtype)
        self.checkpoint = checkpoint
        self.head = (
            None
            if tie_head
            else make_linear(size, vocab_size, dtype=dtype, init=init, key=head_key)
        )

    @property
    def token_shape(self) -> tuple[int, ...]:
        return ()

    @property
    def state(self) -> tuple[PyTree, ...]:
        return tuple(block.state for block in self.pattern)

    def initial_state(self) -> tuple[PyTree, ...]:
        return tuple(block.initial_state() for block in self.pattern)

    def run(
        self, x: Int[Array, " seq"], state: tuple[PyTree, ...], time: AbstractTimeline
    ) -> tuple[Float[Array, "seq vocab"], tuple[PyTree, ...]]:
        arrays, static = eqx.partition(self.pattern, eqx.is_array)

        def run_block(block, x, state):
            return block.run(x, state, time)

        if self.checkpoint:
            # In a loop, common subexpressions cannot undo it: no need to guard against it.
            run_block = eqx.filter_checkpoint(run_block, prevent_cse=False)

        def repetition(x, pattern_and_states):
            arrays, states = pattern_and_states
            new_states = []
            for block, state in zip(eqx.combine(arrays, static), states, strict=True):
                x, state = run_block(block, x, state)
                new_states.append(state)
            return x, tuple(new_states)

        y = _rows(self.embedding.weight, x)
        y, state = jax.lax.scan(repetition, y, (arrays, time.layers_first(state)))
        weight = self.embedding.weight if self.head is None else self.head.weight
        logits = jnp.einsum(
            "td,vd->tv",
            jax.vmap(self.norm)(y),
            weight,
            preferred_element_type=wide_dtype(weight.dtype),
        )
        return logits, time.layers_first(state)

    def loss(
        self,
        tokens: Int[Array, " seq"],
        targets: Int[Array, " seq"],
        state: tuple[PyTree, ...] | None = None,
        *,
        cu_seqlens: CuSeqlens | None = None,
        chunk_size: int | None = None,
        method: AbstractMethod | None = None,
    ) -> tuple[Float[Array, ""], PyTree]:
        """The cross-entropy of the targets, added up over the tokens.

        A sum, so that the losses of the pieces of a sequence add up to that of the whole. See
        [`linrec.scan_chunks`][] for sequences whose logits would not fit into memory.

        **Arguments:** `targets` are what `tokens` should predict: most often the tokens one place
        further on. Negative ones, and those of padding after the last of packed sequences, do not
        count; one outside of the vocabulary makes the loss NaN. The others are as in `__call__`.

        **Returns:** `(loss, state)`.
        """
        targets = jnp.asarray(targets)
        if targets.shape != jnp.shape(tokens):
            raise ValueError(
                "`LanguageModel.loss(tokens, targets, ...)` expects a target for each token, but "
                f"got shapes {jnp.shape(tokens)} and {targets.shape}."
            )
        if not jnp.issubdtype(targets.dtype, jnp.integer):
            raise TypeError(
                "`LanguageModel.loss(tokens, targets, ...)` expects targets that are integers, but "
                f"got {targets.dtype}."
            )
        logits, state = self(
            tokens, state, cu_seqlens=cu_seqlens, chunk_size=chunk_size, method=method
        )
        counts = targets >= 0
        if cu_seqlens is not None:
            counts &= is_token(jnp.asarray(cu_seqlens, jnp.int32), targets.shape[0])
        known = jnp.where(counts, targets, 0)
        predicted = jnp.take_along_axis(logits, known[:, None], axis=-1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - predicted
        return jnp.sum(jnp.where(counts, losses, 0)), state


def _rows(table: Float[Array, "rows dim"], index: Int[Array, " seq"]) -> Float[Array, "seq dim"]:
    """`table[index]`, sharded as `index` is: where types say so, JAX wants to be told."""
    sharding = jax.typeof(index).sharding
    if not sharding.mesh.explicit_axes:
        return table[index]
    place = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, None))
    return table.at[index].get(out_sharding=place)


def _period(blocks: list[Block]) -> int:
    """The shortest pattern that, repeated, gives blocks of these kinds and shapes."""
    kinds = [eqx.filter_eval_shape(lambda block: block, block) for block in blocks]
    L = len(blocks)
    fits = lambda p: all(eqx.tree_equal(kinds[i], kinds[i % p]) for i in range(L))
    return next(p for p in range(1, L + 1) if L % p == 0 and fits(p))


def _stack(blocks: list[Block]) -> Block:
    stack = lambda *leaves: jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0]
    return jax.tree.map(stack, *blocks)
