"""Train a language model whose rows and sequences are spread over devices.

The text is the source code of linrec, in bytes; every sequence lies on several devices. Prints the
loss and tokens per second. In the end, one device alone has to come to the same loss.

On one machine, with 8 simulated devices:

    python examples/train_parallel.py

In several processes, of one machine or of many, each started as

    python examples/train_parallel.py --processes 2 --process 0 --coordinator localhost:1234

with its own number for `--process`.
"""

import time
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import at_least, channels, make_parser
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import linrec


def main():
    parser = make_parser(__doc__)
    for option, default, meaning in (
        ("--steps", 60, "of training"),
        ("--length", 512, "tokens of a sequence"),
        ("--batch", 8, "sequences in a step"),
        ("--seq-shards", 4, "devices that a sequence is spread over"),
        ("--devices", 8, "to simulate on CPUs, in all"),
        ("--processes", 1, "in all"),
    ):
        parser.add_argument(option, type=at_least(1), default=default, help=meaning)
    parser.add_argument("--size", type=channels, default=64, help="channels")
    parser.add_argument("--process", type=at_least(0), default=0, help="which of them this is")
    parser.add_argument("--coordinator", default="localhost:1234", help="where they meet")
    args = parser.parse_args()
    text = read_text()
    if args.length >= text.size:
        parser.error(f"argument --length: expected less than the {text.size:,} bytes of text")

    # For CPUs. Other devices are as many as they are.
    jax.config.update("jax_num_cpu_devices", args.devices // args.processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if args.processes > 1:
        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    shape = (jax.device_count() // args.seq_shards, args.seq_shards)
    for what, number, parts in (
        ("devices", jax.device_count(), args.seq_shards),
        ("rows of a batch", args.batch, shape[0]),
        ("tokens of a sequence", args.length, shape[1]),
    ):
        if number % parts != 0:
            parser.error(f"{number} {what} cannot be dealt out to {parts} evenly")
    mesh = jax.make_mesh(shape, ("data", "seq"), axis_types=(AxisType.Auto,) * 2)
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_row_and_token = NamedSharding(mesh, PartitionSpec("data", "seq"))
    method = linrec.SequenceParallel(linrec.Auto(), mesh, "seq")

    def make_mixer(layer_idx, key):
        return linrec.nn.GatedLinearAttention(args.size, 2, conv_size=4, key=key)

    model = linrec.nn.LanguageModel(make_mixer, 2, 256, key=jax.random.key(0))
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, args.steps))
    parameters, rest = eqx.partition(model, linrec.nn.trainable(model))
    parameters, state = jax.device_put((parameters, optimiser.init(parameters)), everywhere)

    def bits_per_byte(parameters, tokens, targets, method=None):
        loss = lambda *row: eqx.combine(parameters, rest).loss(*row, method=method)[0]
        # The rows of the batch are sharded too: `vmap` has to know over which axis.
        spread = None if method is None else "data"
        losses = jax.vmap(loss, spmd_axis_name=spread)(tokens, targets)
        return jnp.sum(losses) / tokens.size / jnp.log(2)

    @jax.jit
    def train(parameters, state, tokens, targets):
        gradient = jax.value_and_grad(bits_per_byte)
        loss, gradients = gradient(parameters, tokens, targets, method)
        updates, state = optimiser.update(gradients, state)
        return optax.apply_updates(parameters, updates), state, loss

    def batch(step):
        """Every process cuts the whole batch and keeps what its devices hold of it."""
        begin = np.random.default_rng(step).integers(0, text.size - args.length, args.batch)
        rows = np.stack([text[i : i + args.length + 1] for i in begin])
        return rows[:, :-1], rows[:, 1:]

    def spread(rows):
        return jax.make_array_from_callback(rows.shape, by_row_and_token, lambda at: rows[at])

    if args.process == 0:
        print(f"processes: {jax.process_count()}")
        print(f"devices: {shape[0]} x {shape[1]} (rows x tokens)")
    texts = ("{task.fields[loss]:.3f} bits per byte", "{task.fields[rate]:,.0f} tokens/s")
    columns = (BarColumn(), *map(TextColumn, texts), TimeElapsedColumn())
    with Progress(*columns, disable=args.process != 0) as progress:
        task = progress.add_task("train", total=args.steps, loss=8.0, rate=0.0)
        for step in range(args.steps):
            tokens, targets = map(spread, batch(step))
            start = time.perf_counter()
            parameters, state, loss = train(parameters, state, tokens, targets)
            loss = float(loss)
            rate = tokens.size / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=loss, rate=rate)

    rows = batch(args.steps)
    together = jax.jit(partial(bits_per_byte, method=method))(parameters, *map(spread, rows))
    if args.process == 0:
        here = jax.tree.map(np.asarray, parameters)
        alone = jax.jit(bits_per_byte)(here, *rows)
        print("bits per byte of the next batch (8 would be a guess):")
        print(f"    {mesh.size} devices together {float(together):.6f}")
        print(f"    one device alone   {float(alone):.6f}")


def read_text() -> np.ndarray:
    files = sorted(Path(linrec.__file__).parent.glob("**/*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)


if __name__ == "__main__":
    main()
