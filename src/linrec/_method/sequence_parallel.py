"""Another method on several devices, each of which holds a part of the sequence axis."""

import dataclasses
import math
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.flatten_util import ravel_pytree
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from .._inputs import Inputs, Tokens
from .._types import CuSeqlens
from .._varlen import Piece
from .base import AbstractMethod
from .segmented import Segmented


MeshAxes: TypeAlias = str | tuple[str, ...] | None

# Up to so many shards one `all_gather` is faster than several steps, each of which has to wait.
_FEW_SHARDS = 8
# Stands for -inf: e^g is 0 all the same, and sums and differences of it are not NaN.
_FORGET = -1e30


class SequenceParallel(AbstractMethod):
    r"""Another method with the sequence axis sharded over devices.

    The state at the end of a shard is $e^{a} h\, e^{c} + S$, where $h$ is the state that comes in,
    $a$ and $c$ are the sums of the shard's gates, and $S$ is where the shard gets to from nothing.
    Every device computes $(a, c, S)$ of its shard, one product of keys and values. One exchange of
    them gives every device its $h$, from which `method` runs the shard. What is exchanged does not
    depend on the number of tokens. The backward pass has one exchange more, the other way.

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
    """

    method: AbstractMethod
    mesh: Mesh | AbstractMesh = eqx.field(static=True)
    axis: str = eqx.field(static=True)
    batch_axis: MeshAxes = eqx.field(static=True, default=None)
    head_axis: MeshAxes = eqx.field(static=True, default=None)
    exchange: Literal["all_gather", "log_step"] | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        for argument in ("axis", "batch_axis", "head_axis"):
            names = _names(getattr(self, argument))
            if not set(names) <= set(self.mesh.axis_names):
                raise ValueError(
                    f"`linrec.SequenceParallel(..., {argument}={getattr(self, argument)!r})` "
                    f"expects an axis of the mesh, which has {self.mesh.axis_names}."
                )
        if self.exchange not in ("all_gather", "log_step", None):
            raise ValueError(
                "`linrec.SequenceParallel(..., exchange=...)` expects 'all_gather' or 'log_step', "
                f"but got {self.exchange!r}."
            )

    @property
    def shards(self) -> int:
        return self.mesh.shape[self.axis]

    def unsupported(self, inputs: Inputs) -> str | None:
        return self.method.unsupported(inputs)

    def in_pieces(self, chunk_size: int) -> "SequenceParallel":
        """The same in bounded memory: every device cuts its own shard."""
        return dataclasses.replace(self, method=Segmented(chunk_size, self.method))

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        T = inputs.q.shape[1]
        if T == 0:
            return inputs.zeros(inputs.output_shape, inputs.v.dtype), inputs.initial_state
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
        return partial(
            jax.shard_map, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
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
    def of(parallel: SequenceParallel, T: int, cu_seqlens: CuSeqlens | None) -> "Cut":
        size = -(-T // parallel.shards)
        ragged = cu_seqlens is not None or T % parallel.shards != 0
        bounds = T * jnp.arange(2, dtype=jnp.int32) if cu_seqlens is None else cu_seqlens
        return Cut(parallel.axis, parallel.shards, T, size, jnp.asarray(bounds, jnp.int32), ragged)

    def pad(self, x: Array, axis: int) -> Array:
        missing = self.shards * self.size - self.length
        return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])

    def piece(self, bounds: Int[Array, " boundaries"], reverse: bool) -> Piece:
        """The shard of the device that runs this, inside `jax.shard_map`."""
        return Piece(bounds, jax.lax.axis_index(self.axis) * self.size, self.size, reverse)


class OneShard(AbstractMethod):
    """What one device does, inside `jax.shard_map`, with its tokens and all initial states.

    Outputs come from the inner method itself, from the true state. To run it from nothing and to
    add what the true state contributes would cost as much, round half-precision outputs twice,
    and fail where the gates of a whole shard do not fit into one factor.
    """

    parallel: SequenceParallel
    piece: Piece

    def unsupported(self, inputs: Inputs) -> str | None:
        return self.parallel.unsupported(inputs)

    def __call__(self, inputs: Inputs) -> tuple[Array, Array]:
        piece, axis, shards = self.piece, self.parallel.axis, self.parallel.shards
        exchange = self.parallel.exchange or ("all_gather" if shards <= _FEW_SHARDS else "log_step")
        ring = _Ring(axis, shards, inputs.reverse, exchange == "log_step")
        h = jnp.asarray(_incoming(ring, _as_map(inputs, piece)))
        comes_in = piece.comes_in()[None, :, None, None, None]
        initial_state = jnp.where(comes_in, h[:, None], inputs.initial_state)
        inputs = dataclasses.replace(inputs, initial_state=initial_state)
        output, final_state = self.parallel.method(inputs)
        ends = piece.ends(shards)[None, :, None, None, None]
        return output, jax.lax.psum(jnp.where(ends, final_state, 0), axis)


class _Map(NamedTuple):
    """A shard, as what it does to a state: from `h` to `e^g_key h e^g_value + state`.

    What it maps is the state of a sequence that goes out over the end of the shard. If it starts in
    the shard, nothing is left of what comes in.
    """

    g_key: Float[Array, "batch heads key_or_1 1"]
    g_value: Float[Array, "batch heads 1 value_or_1"]
    state: Float[Array, "batch heads key value"]

    def decay(self, h: Array) -> Array:
        """The two gates may cancel: they add up before `exp`. And growth of nothing is nothing."""
        largest = math.log(jnp.finfo(h.dtype).max) - 1
        return jnp.exp(jnp.minimum(self.g_key + self.g_value, largest)) * h

    def after(self, other: "_Map") -> "_Map":
        """Both shards as one."""
        return _Map(
            self.g_key + other.g_key,
            self.g_value + other.g_value,
            self.decay(other.state) + self.state,
        )


def _as_map(inputs: Inputs, piece: Piece) -> _Map:
    """All tokens at once: one product of keys and values, each decayed up to the end."""
    n = jnp.argmax(piece.goes_out())
    goes_out, comes_in = piece.goes_out()[n], piece.comes_in()[n]
    t = jnp.arange(piece.size, dtype=jnp.int32)
    begin, end = piece.cu_seqlens[n], piece.cu_seqlens[n + 1]
    counts = ((begin <= t) & (t < end) & goes_out)[None, :, None, None]

    def of_query_heads(x: Array) -> Array:
        # First of all without what is padding: it may hold anything.
        x = jnp.where(counts, x.astype(inputs.state_dtype), 0)
        return jnp.repeat(x, inputs.q.shape[2] // x.shape[2], axis=2)

    def sums(*gates: Array | None) -> tuple[Array, Array]:
        """Of the gates after each token, and of all."""
        zeros = inputs.zeros((*inputs.q.shape[:3], 1), inputs.state_dtype)
        g = sum((x.astype(zeros.dtype) for x in gates if x is not None), start=zeros)
        g = jnp.where(counts, jnp.maximum(g, _FORGET), 0)
        until = jax.lax.cumsum(g, axis=1, reverse=not inputs.reverse)
        # Shifted: a difference would lose digits after a strong gate.
        nothing = jnp.zeros_like(g[:, :1])
        if inputs.reverse:
            return jnp.concatenate([nothing, until[:, :-1]], 1), until[:, -1]
        return jnp.concatenate([until[:, 1:], nothing], 1), until[:, 0]

    g = None if inputs.g is None else inputs.g[..., None]
    g_gamma = None if inputs.g_gamma is None else inputs.g_gamma[:, n][:, None, :, None]
    g_key, all_key = sums(g, g_gamma, inputs.gk)
    g_value, all_value = sums(inputs.gv)
    # Over a whole shard the gates of keys and of values may each overflow, where together they
    # cancel. What is moved from one to the other makes the largest factors of both equal.
    largest = lambda g: jnp.max(g, axis=-1, keepdims=True)
    moved = jax.lax.stop_gradient((largest(g_key) - largest(g_value)) / 2)
    k = of_query_heads(inputs.k) * jnp.exp(g_key - moved)
    v = of_query_heads(inputs.v) * jnp.exp(g_value + moved)
    written = jnp.einsum("bthk,bthv->bhkv", k, v, precision=inputs.precision)
    shard = _Map(all_key[..., None], all_value[..., None, :], written)
    start = jnp.where(goes_out & ~comes_in, inputs.initial_state[:, n], 0)
    return _Map(
        jnp.where(goes_out & comes_in, shard.g_key, _FORGET),
        shard.g_value,
        shard.decay(start) + written,
    )


class _Ring(NamedTuple):
    """The devices of the sequence axis, one shard each."""

    axis: str
    shards: int
    reverse: bool
    """Whether the first shard is that of the last device."""
    log_step: bool

    def shift(self, x: Array, distance: int) -> Array:
        """What the shard has that lies so far before this one; zeros where there is none."""
        pairs = [(i, i + distance) for i in range(self.shards - distance)]
        pairs = [(j, i) for i, j in pairs] if self.reverse else pairs
        return jax.lax.ppermute(x, self.axis, pairs)

    def earlier(self) -> Array:
        """How many shards lie before this one."""
        device = jax.lax.axis_index(self.axis)
        return self.shards - 1 - device if self.reverse else device


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _incoming(ring: _Ring, shard: _Map) -> Float[Array, "batch heads key value"]:
    """The state that comes in to this shard: nothing, mapped by all shards before it in turn."""
    packed, unpack = ravel_pytree(shard)  # one array, so that it is one exchange
    nothing = jnp.zeros_like(shard.state)
    if ring.shards == 1:
        return nothing
    if not ring.log_step:
        everyone = jax.lax.all_gather(packed, ring.axis)

        def body(i, h):
            shard = unpack(everyone[ring.shards - 1 - i if ring.reverse else i])
            return shard.decay(h) + shard.state

        return jax.lax.fori_loop(0, ring.earlier(), body, nothing)

    # Zeros, which come from where there is no shard, are the map that changes nothing.
    past, reach = unpack(ring.shift(packed, 1)), 1
    while reach < ring.shards - 1:
        past = past.after(unpack(ring.shift(ravel_pytree(past)[0], reach)))
        reach *= 2
    return past.state


def _incoming_forward(ring: _Ring, shard: _Map):
    h = checkpoint_name(_incoming(ring, shard), "linrec_incoming_state")
    return h, (shard.g_key, shard.g_value, h)


def _incoming_backward(ring: _Ring, residuals, d_h: Array):
    """The gradient goes the same way back, through the same decays."""
    g_key, g_value, h = residuals
    back = ring._replace(reverse=not ring.reverse)
    d_state = jnp.asarray(_incoming(back, _Map(g_key, g_value, d_h)))
    d_decay = _Map(g_key, g_value, d_h).decay(h) * d_state
    d_key, d_value = (_sum_to(x.shape, d_decay) for x in (g_key, g_value))
    return (_Map(d_key, d_value, d_state),)


_incoming.defvjp(_incoming_forward, _incoming_backward)


def _sum_to(shape: tuple[int, ...], x: Array) -> Array:
    axes = tuple(axis for axis, size in enumerate(shape) if size < x.shape[axis])
    return jnp.sum(x, axes, keepdims=True)


def _names(axes: MeshAxes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else axes or ()
