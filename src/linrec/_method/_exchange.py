"""What a shard of the sequence axis does to a state, and how devices tell each other."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from .._transform import saved_by_checkpoints


class Map(NamedTuple):
    """From a state `h` to `e^g_key h e^g_value + state`."""

    g_key: Float[Array, "batch heads key_or_1 1"]
    g_value: Float[Array, "batch heads 1 value_or_1"]
    state: Float[Array, "batch heads key value"]

    def __call__(self, h: Array) -> Array:
        return decay(h, self.g_key, self.g_value) + self.state

    def after(self, other: "Map") -> "Map":
        """Both maps as one."""
        return Map(self.g_key + other.g_key, self.g_value + other.g_value, self(other.state))


def decay(h: Array, g_key: Array, g_value: Array) -> Array:
    """The two gates may cancel: they add up before `exp`."""
    return exp(g_key + g_value) * h


def exp(g: Array) -> Array:
    """Finite, so that growth of nothing is nothing."""
    return jnp.exp(jnp.minimum(g, math.log(jnp.finfo(g.dtype).max) - 1))


class Ring(NamedTuple):
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
def incoming(ring: Ring, shard: Map) -> Float[Array, "batch heads key value"]:
    """The state that comes in to this shard: nothing, mapped by all shards before it in turn."""
    packed, unpack = ravel_pytree(shard)  # one array, so that it is one exchange
    nothing = jnp.zeros_like(shard.state)
    if not ring.log_step:
        everyone = jax.lax.all_gather(packed, ring.axis)

        def body(i, h):
            return unpack(everyone[ring.shards - 1 - i if ring.reverse else i])(h)

        return jax.lax.fori_loop(0, ring.earlier(), body, nothing)

    # Zeros, which come from where there is no shard, are the map that changes nothing.
    past, reach = unpack(ring.shift(packed, 1)), 1
    while reach < ring.shards - 1:
        past = past.after(unpack(ring.shift(ravel_pytree(past)[0], reach)))
        reach *= 2
    return past.state


def _incoming_forward(ring: Ring, shard: Map):
    h = saved_by_checkpoints(incoming(ring, shard))
    return h, (shard.g_key, shard.g_value, h)


def _incoming_backward(ring: Ring, residuals, d_h: Array):
    """The gradient goes the same way back, through the same decays."""
    g_key, g_value, h = residuals
    back = ring._replace(reverse=not ring.reverse)
    d_state = jnp.asarray(incoming(back, Map(g_key, g_value, d_h)))
    d_decay = decay(h, g_key, g_value) * d_state
    d_key, d_value = (_sum_to(x.shape, d_decay) for x in (g_key, g_value))
    return (Map(d_key, d_value, d_state),)


incoming.defvjp(_incoming_forward, _incoming_backward)


def _sum_to(shape: tuple[int, ...], x: Array) -> Array:
    axes = tuple(axis for axis, size in enumerate(shape) if size < x.shape[axis])
    return jnp.sum(x, axes, keepdims=True)
