"""A training step compiled by XLA for an H100 that is not there."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import linrec


class StepMemory(NamedTuple):
    forward_bytes: int
    """Temporaries of the forward pass."""
    both_bytes: int
    """Temporaries of a loss and its gradient."""


def h100() -> jax.sharding.Sharding:
    """Where to compile for. Needs `XLA_FLAGS=--xla_gpu_autotune_level=0`: nothing can be timed."""
    return jax.sharding.SingleDeviceSharding(h100_devices()[0])


def h100_devices() -> list:
    """Eight of them, that programs can be compiled for."""
    description = (Path(__file__).parent / "h100.txtpb").read_text()
    topology = topologies.get_topology_desc("", "cuda", target_config=description, topology="1x1x8")
    return topology.devices


def step_memory(
    method: linrec.AbstractMethod,
    arguments: dict[str, jax.ShapeDtypeStruct],
    sharding: jax.sharding.Sharding,
) -> StepMemory:
    def run(arguments):
        return linrec.recurrent(**arguments, method=method)

    def loss(arguments):
        return jnp.sum(run(arguments)[0].astype(jnp.float32))

    placed = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in arguments.items()
    }

    def temporaries(function) -> int:
        memory = jax.jit(function).lower(placed).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    return StepMemory(temporaries(run), temporaries(jax.value_and_grad(loss)))
