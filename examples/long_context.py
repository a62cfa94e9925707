"""Trains on one sequence of a million tokens, in memory that hardly depends on its length.

First a plot: the memory that a loss and its gradient need against the length of the sequence, for
the whole sequence at once and in chunks. This is what the compiler says; nothing that large is
run. Then a model is trained on one sequence of `--length` tokens, its gradient through all of them,
and the peak memory of the process is printed. Takes about three minutes on two cores.
"""

import argparse
import resource
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _common import (
    at_least,
    channels,
    existing,
    make_model,
    make_parser,
    MIXERS,
    plot_file,
    positive,
    progress_bar,
    read_text,
)

import linrec


MIB = 2**20


def loss_and_gradient(chunk_size: int | None):
    """Of the mean loss over a sequence; `None` is for all of it at once."""

    def loss(model: linrec.nn.LanguageModel, tokens: jax.Array) -> jax.Array:
        xs = (tokens[:-1], tokens[1:])
        if chunk_size is None:
            total, _ = model.loss(*xs)
        else:
            total, _ = linrec.scan_chunks(
                lambda chunk, state: model.loss(*chunk, state),
                xs,
                model.initial_state(),
                chunk_size,
            )
        return total / len(xs[0])

    return eqx.filter_value_and_grad(loss)


def memory(model: linrec.nn.LanguageModel, length: int, chunk_size: int | None) -> float:
    """MiB that the compiled program allocates."""
    tokens = jnp.zeros((length + 1,), jnp.int32)
    program = eqx.filter_jit(loss_and_gradient(chunk_size)).lower(model, tokens).compile()
    return program.compiled.memory_analysis().temp_size_in_bytes / MIB


def peak_memory() -> float:
    """MiB of this process, so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB


def tokens_label(length: int) -> str:
    return f"{length / 1024:g}k" if length >= 1024 else str(length)


def plot_memory(model: linrec.nn.LanguageModel, args: argparse.Namespace) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=2 * len(args.lengths))
        for chunk_size in (None, args.chunk_size):
            label = "whole" if chunk_size is None else f"chunk_size={chunk_size}"
            used = []
            for length in args.lengths:
                used.append(memory(model, length, chunk_size))
                bar.update(task, advance=1)
            axes.plot(args.lengths, used, marker="o", label=label)
            print(f"{label:>16}: {used[-1]:10,.0f} MiB for {args.lengths[-1]:,} tokens")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(args.lengths, [tokens_label(length) for length in args.lengths])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set(xlabel="tokens", ylabel="MiB for a loss and its gradient")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.output, dpi=150)
    print(f"wrote {args.output}")


def train(model: linrec.nn.LanguageModel, text: np.ndarray, args: argparse.Namespace) -> None:
    tokens = jnp.asarray(np.resize(text, args.length + 1), jnp.int32)
    optimiser = optax.adam(args.rate)
    trainable = linrec.nn.trainable(model)
    state = optimiser.init(eqx.filter(model, trainable))

    @eqx.filter_jit
    def step(model, state, tokens):
        loss, gradient = loss_and_gradient(args.chunk_size)(model, tokens)
        updates, state = optimiser.update(eqx.filter(gradient, trainable), state)
        return eqx.apply_updates(model, updates), state, loss

    step = step.lower(model, state, tokens).compile()
    before = peak_memory()
    columns = ("loss {task.fields[loss]:.3f}", "{task.fields[speed]:,.0f} tok/s")
    with progress_bar(*columns) as bar:
        task = bar.add_task(f"{args.length:,} tokens", total=args.steps, loss=np.nan, speed=0.0)
        for _ in range(args.steps):
            begin = time.perf_counter()
            model, state, loss = step(model, state, tokens)
            loss = float(loss)
            speed = args.length / (time.perf_counter() - begin)
            bar.update(task, advance=1, loss=loss, speed=speed)
            bar.console.print(f"loss {loss:.3f}, {speed:,.0f} tokens/s")
    print(f"peak memory of this process: {peak_memory():,.0f} MiB")
    print(f"before training began:       {before:,.0f} MiB")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--length", type=at_least(1), default=1_000_000, help="tokens to train on")
    parser.add_argument("--chunk-size", type=at_least(1), default=2048, help="tokens of a chunk")
    lengths = [2**n for n in range(12, 21, 2)]
    parser.add_argument(
        "--lengths", nargs="+", type=at_least(1), default=lengths, help="to plot", metavar="LENGTH"
    )
    parser.add_argument(
        "--mixer", choices=MIXERS, default="SimpleGatedLinearAttention", help="of all layers"
    )
    parser.add_argument("--size", type=channels, default=64, help="channels")
    parser.add_argument("--layers", type=at_least(1), default=2, help="layers of the model")
    parser.add_argument("--steps", type=at_least(0), default=3, help="of training")
    parser.add_argument("--rate", type=positive, default=1e-2, help="of learning")
    parser.add_argument(
        "--text",
        type=existing,
        help="a file or a folder to learn from (default: the Python standard library)",
    )
    parser.add_argument("--output", type=plot_file, default="long_context.png", help="the plot")
    args = parser.parse_args()

    text, _ = read_text(args.text, 1)
    model = make_model(args.mixer, args.size, args.layers, key=jax.random.key(0))
    plot_memory(model, args)
    train(model, text, args)


if __name__ == "__main__":
    main()
