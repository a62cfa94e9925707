"""Another method on several devices, each of which holds a part of the sequence axis."""

import dataclasses
import math
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Int

from .._inputs import Inputs, Tokens
from .._varlen import boundaries, Piece
from ._crossing import add_incoming, as_map
from ._exchange import incoming, Ring
from .base import AbstractMethod, expect_method


MeshAxes: TypeAlias = str | tuple[str, ...] | None

# Up to so many shards one `all_gather` is faster than several steps, each of which has to wait, and
# too fast for the work to be worth rearranging. They are the GPUs of one machine.
_FEW_SHARDS = 8


class SequenceParallel(AbstractMethod):
    r"""Another method with the sequence axis sharded over devices.

    The state at the end of a shard is $e^{a} h\, e^{c} + S$, where $h$ is the state that comes in,
    $a$ and $c$ are the sums of the shard's gates, and $S$ is where the shard gets to from nothing.
    Every device computes $(a, c, S)$ of its shard, one product of keys and values. One exchange of
    them gives every device its $h$. `method` runs the shard, from $h$ or, while the exchange is
    under way, from nothing. What is exchanged does not depend on the number of tokens. The backward
    pass has one exchange more, the other way; `jax.checkpoint` does not repeat the first.

    Gates may be of any size, as everywhere, but no state may grow over a shard by more than
    $e^{87}$, even one that is zero and stays so.

    !!! example

        ```python
        import jax
        import linrec
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        mesh = jax.make_mesh((jax.device_count(),), ("seq",), axis_types=(AxisType.Auto,))
        method = linrec.SequenceParallel(linrec.Auto(), mesh, "seq")
        x = jax.random.normal(jax.random.key(0), (1, 4096, 4, 64))
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "seq")))
        o, state = jax.jit(lambda x: linrec.recurrent(x, x, x, method=method))(x)
        ```

    **Arguments:**

    - `method`: runs the shards.
    - `mesh`: the devices.
    - `axis`: the axis of `mesh` over which the sequence axis is sharded. Lengths that it does not
        divide are padded.
    - `batch_axis`, `head_axis`: axes of `mesh` over which the batch and the heads are sharded.
        Rows that are mapped over name theirs there: `jax.vmap(f, spmd_axis_name="data")`.
    - `exchange`: `"all_gather"` sends every state to every device at once. `"log_step"` passes
        states on, in about as many steps as the number of shards has binary digits. Defaults to the
        first for up to 8 shards, to the second for more.
    - `overlap`: whether `method` runs without waiting for the exchange. What the tokens read of $h$
        is added: one product more, and half-precision outputs are rounded twice. Defaults to `True`
        for more than 8 shards: among fewer, the exchange takes less time than the product.
    """

    method: AbstractMethod
    mesh: Mesh | AbstractMesh = eqx.field(static=True)
    axis: str = eqx.field(static=True)
    batch_axis: MeshAxes = eqx.field(static=True, default=None)
    head_axis: MeshAxes = eqx.field(static=True, default=None)
    exchange: Literal["all_gather", "log_step"] | None = eqx.field(static=True, default=None)
    overlap: bool | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        expect_method("linrec.SequenceParallel(method, ...)", self.method)
        if not isinstance(self.mesh, Mesh | AbstractMesh):
            raise ValueError(
                "`linrec.SequenceParallel(method, mesh, ...)` expects a mesh, but got "
                f"{self.mesh!r}."
            )
        axes = (self.axis,), _names(self.batch_axis), _names(self.head_axis)
        for argument, names in zip(("axis", "batch_axis", "head_axis"), axes, strict=True):
            if not set(names) <= set(self.mesh.axis_names):
                raise ValueError(
                    f"`linrec.SequenceParallel(..., {argument}={getattr(self, argument)!r})` "
                    f"expects an axis of the mesh, which has {self.mesh.axis_names}."
                )
        used = [name for names in axes for name in names]
        if len(set(used)) < len(used):
            raise ValueError(
                "`linrec.SequenceParallel(..., axis, batch_axis, head_axis)` expects different "
                f"axes of the mesh, but got {used}."
            )
        if self.exchange not in ("all_gather", "log_step", None):
            raise ValueError(
                "`linrec.SequenceParallel(..., exchange=...)` expects 'all_gather' or 'log_step', "
                f"but got {self.exchange!r}."
            )

    @property
    def shards(self) -> int:
        return self.mesh.shape[self.axis]

    @property
    def overlaps(self) -> bool:
        wanted = self.shards > _FEW_SHARDS if self.overlap is None else self.overlap
        return wanted and self.shards > 1

    def ring(self, reverse: bool) -> Ring:
        exchange = self.exchange or ("all_gather" if self.shards <= _FEW_SHARDS else "log_step")
        return Ring(self.axis, self.shards, reverse, exchange == "log_step")

    def unsupported(self, inputs: Inputs) -> str | None:
        return self.method.unsupported(inputs)

    def in_pieces(self, chunk_size: int) -> AbstractMethod:
        """Every device cuts its own shard."""
        return dataclasses.replace(self, method=self.method.in_pieces(chunk_size))

    def run_layer(self, layer, x, state, cu_seqlens):
        """All of the layer where the tokens are, not its recurrences alone."""
        from ..nn._sharded import run_sharded

        return run_sharded(layer, x, state, cu_seqlens, self)

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        T = inputs.q.shape[1]
        self._check_sizes(inputs)
        cut = Cut.of(self, T, inputs.cu_seqlens)
        of_tokens = PartitionSpec(self.batch_axis, self.axis, self.head_axis)
        of_sequences = PartitionSpec(self.batch_axis, None, self.head_axis)

        @self.shard_map(
            in_specs=(of_tokens, of_sequences, PartitionSpec(self.batch_axis), PartitionSpec()),
            out_specs=(of_tokens, of_sequences),
        )
        def run(tokens: Tokens, per_sequence, scale, bounds):
            piece = cut.piece(bounds, inputs.reverse)
            g_gamma, initial_state = per_sequence
            cu_seqlens = piece.cu_seqlens if cut.ragged else None
            shard = Inputs(*tokens, g_gamma, scale, initial_state, cu_seqlens, inputs.reverse)
            return OneShard(self, piece)(shard)

        tokens = jax.tree.map(lambda x: cut.pad(x, 1), inputs.tokens)
        per_sequence = (inputs.g_gamma, inputs.initial_state)
        output, final_state = run(tokens, per_sequence, inputs.scale, cut.bounds)
        return output[:, :T], final_state

    def shard_map(self, in_specs, out_specs):
        """A decorator. All axes of the mesh are manual: over those that are not, XLA would gather.

        Without checks of varying types, which `jax.vmap(..., spmd_axis_name=...)` does not pass.
        """
        mesh, here = self.mesh, jax.sharding.get_abstract_mesh()
        if mesh.explicit_axes and not here.empty:  # the same, as `in_auto_axes` may have made it
            mesh = here
        return partial(
            jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _check_sizes(self, inputs: Inputs) -> None:
        B, _, Hkv, _ = inputs.k.shape
        for what, number, argument in (
            ("rows of the batch", B, "batch_axis"),
            ("heads of `key` and `value`", Hkv, "head_axis"),
        ):
            names = _names(getattr(self, argument))
            devices = math.prod(self.mesh.shape[name] for name in names)
            if number % devices != 0:
                raise ValueError(
                    f"`linrec.SequenceParallel(..., {argument}={getattr(self, argument)!r})` "
                    f"cannot deal out {number} {what} to {devices} devices evenly."
                )


class Cut(NamedTuple):
    """How a sequence axis is cut into shards."""

    axis: str
    shards: int
    length: int
    size: int
    bounds: Int[Array, " boundaries"]
    ragged: bool
    """Whether a shard may hold anything but one whole piece of one sequence."""

    @staticmethod
    def of(parallel: SequenceParallel, T: int, cu_seqlens: Array | None) -> "Cut":
        size = -(-T // parallel.shards)
        ragged = cu_seqlens is not None or T % parallel.shards != 0
        bounds = boundaries(cu_seqlens, T)
        return Cut(parallel.axis, parallel.shards, T, size, bounds, ragged)

    def pad(self, x: Array, axis: int) -> Array:
        missing = self.shards * self.size - self.length
        return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])

    def piece(self, bounds: Int[Array, " boundaries"], reverse: bool) -> Piece:
        """The shard of the device that runs this, inside `jax.shard_map`."""
        return Piece(bounds, jax.lax.axis_index(self.axis) * self.size, self.size, reverse)


class OneShard(AbstractMethod):
    """What one device does, inside `jax.shard_map`, with its tokens and all initial states.

    The inner method either runs from the state that comes in, or from nothing. Then neither it nor
    its gradient waits for an exchange, and what comes in is added to its results.
    """

    parallel: SequenceParallel
    piece: Piece

    def unsupported(self, inputs: Inputs) -> str | None:
        return self.parallel.unsupported(inputs)

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        parallel, piece = self.parallel, self.piece
        shard = as_map(inputs, piece)
        h = jnp.zeros_like(shard.state)
        if parallel.shards > 1:
            h = jnp.asarray(incoming(parallel.ring(inputs.reverse), shard))
        overlap = parallel.overlaps
        comes_in = piece.comes_in()[None, :, None, None, None]
        start = jnp.where(comes_in, 0 if overlap else h[:, None], inputs.initial_state)
        results = parallel.method(dataclasses.replace(inputs, initial_state=start))
        if overlap:
            results = add_incoming(inputs, piece, h, *results)
        output, final_state = results
        ends = piece.ends(parallel.shards)[None, :, None, None, None]
        return output, jax.lax.psum(jnp.where(ends, final_state, 0), parallel.axis)


def _names(axes: MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()
