"""One of several processes that run a recurrence together, and compare it with one device.

`python parallel_worker.py PROCESS PROCESSES PORT`. Fails if anything differs.
"""

import sys
from functools import partial

import jax


DEVICES = 4


def main(process: int, processes: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", processes, process)
    assert jax.process_count() == processes
    assert jax.device_count() == DEVICES

    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import linrec

    mesh = jax.make_mesh((DEVICES,), ("seq",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("seq"))
    T = 64
    q, k, v, gk = np.random.default_rng(0).standard_normal((4, T, 2, 4)).astype(np.float32)
    arguments = {"query": q, "key": k, "value": v, "gk": -np.abs(gk) / 8}
    cu_seqlens = np.array([0, 5, 5, 60], np.int32)  # one sequence is in all of the shards

    @partial(jax.jit, static_argnums=0)
    def everything(method, arguments):
        def run(arguments):
            return linrec.recurrent(**arguments, cu_seqlens=cu_seqlens, method=method)

        (o, state), pull_back = jax.vjp(run, arguments)
        return o, state, pull_back((jnp.cos(o), jnp.cos(state)))

    own = slice(process * T // processes, (process + 1) * T // processes)
    placed = {
        name: jax.make_array_from_process_local_data(sharding, x[own])
        for name, x in arguments.items()
    }
    actual = everything(linrec.SequenceParallel(linrec.Scan(), mesh, "seq"), placed)
    expected = everything(linrec.Scan(), arguments)
    assert not actual[0].is_fully_addressable
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        for shard in a.addressable_shards:
            difference = shard.data - np.asarray(e)[shard.index]
            assert np.sqrt(np.mean(difference**2)) < 1e-5 * np.sqrt(np.mean(np.square(e)))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
