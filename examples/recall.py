"""How much can a state remember? Multi-query associative recall (arXiv:2312.04927).

A sequence shows pairs of a key and a value, then all keys again in another order. At each of
these the model has to give the value. One small model for each layer learns from sequences with
different numbers of pairs; then the accuracy on new sequences is plotted against that number.
Takes about four minutes on two cores.
"""

import argparse
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from _common import (
    at_least,
    channels,
    make_model,
    make_parser,
    MIXERS,
    plot_file,
    positive,
    progress_bar,
)

import linrec


def make_batch(
    rng: np.random.Generator, batch: int, numbers: list[int], symbols: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and the answers to give at them: -1 where nothing is asked.

    Keys are the tokens from 1, values the `symbols` tokens after the keys; 0 is padding.
    """
    tokens = np.zeros((batch, 3 * max(numbers)), np.int32)
    answers = np.full_like(tokens, -1)
    for row in range(batch):
        pairs = rng.choice(numbers)
        keys = 1 + rng.permutation(symbols)[:pairs]
        values = 1 + symbols + rng.integers(symbols, size=pairs)
        order = rng.permutation(pairs)
        tokens[row, 0 : 2 * pairs : 2] = keys
        tokens[row, 1 : 2 * pairs : 2] = values
        tokens[row, 2 * pairs : 3 * pairs] = keys[order]
        answers[row, 2 * pairs : 3 * pairs] = values[order]
    return tokens, answers


def predict(model, tokens, answers):
    """The mean loss, and the share of answers that are right."""
    logits, _ = jax.vmap(lambda tokens: model(tokens))(tokens)
    asked = answers >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(answers, 0))
    right = jnp.argmax(logits, axis=-1) == answers
    return jnp.mean(losses, where=asked), jnp.mean(right, where=asked)


def train(mixer: str, args: argparse.Namespace, bar) -> dict[int, float]:
    """The accuracy of a trained model for each number of pairs."""
    vocab_size = 1 + 2 * args.symbols
    model = make_model(mixer, args.size, args.layers, vocab_size, key=jax.random.key(0))
    optimiser = optax.adamw(
        optax.warmup_cosine_decay_schedule(0, args.rate, args.steps // 10, args.steps),
        weight_decay=0.1,
    )
    trainable = linrec.nn.trainable(model)
    state = optimiser.init(eqx.filter(model, trainable))

    @eqx.filter_jit(donate="all")
    def step(model, state, tokens, answers):
        value_and_grad = eqx.filter_value_and_grad(predict, has_aux=True)
        (loss, right), gradient = value_and_grad(model, tokens, answers)
        parameters, gradient = (eqx.filter(x, trainable) for x in (model, gradient))
        updates, state = optimiser.update(gradient, state, parameters)
        return eqx.apply_updates(model, updates), state, loss, right

    rng = np.random.default_rng(0)
    task = bar.add_task(mixer, total=args.steps, loss=float("nan"), right=0.0, speed=0.0)
    begin = time.perf_counter()
    for i in range(1, args.steps + 1):
        batch = make_batch(rng, args.batch, args.pairs, args.symbols)
        model, state, loss, right = step(model, state, *batch)
        jax.block_until_ready(loss)
        if i == 1:
            begin = time.perf_counter()  # the first step compiles
        speed = (i - 1) * batch[0].size / (time.perf_counter() - begin)
        bar.update(task, advance=1, loss=float(loss), right=float(right), speed=speed)

    evaluate = eqx.filter_jit(predict)
    accuracy = {}
    for pairs in args.pairs:
        # Of the one shape, so that nothing is compiled again.
        tokens, answers = make_batch(rng, 4 * args.batch, [pairs], args.symbols)
        padding = ((0, 0), (0, 3 * (max(args.pairs) - pairs)))
        tokens, answers = np.pad(tokens, padding), np.pad(answers, padding, constant_values=-1)
        accuracy[pairs] = float(evaluate(model, tokens, answers)[1])
    return accuracy


def plot(path: Path, accuracies: dict[str, dict[int, float]]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for mixer, accuracy in accuracies.items():
        axes.plot(list(accuracy), list(accuracy.values()), marker="o", label=mixer)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")
    axes.set(xlabel="pairs of keys and values", ylabel="answers that are right", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--mixers", nargs="+", choices=MIXERS, default=MIXERS, help="(default: all)"
    )
    parser.add_argument(
        "--pairs", nargs="+", type=at_least(1), default=[2, 4, 8, 16], help="in a sequence"
    )
    parser.add_argument("--symbols", type=at_least(1), default=32, help="different keys and values")
    parser.add_argument("--size", type=channels, default=64, help="channels")
    parser.add_argument("--layers", type=at_least(1), default=1, help="layers of a model")
    parser.add_argument("--steps", type=at_least(1), default=300, help="of training")
    parser.add_argument("--batch", type=at_least(1), default=64, help="sequences in a step")
    parser.add_argument("--rate", type=positive, default=1e-2, help="of learning")
    parser.add_argument("--output", type=plot_file, default="recall.png", help="the plot")
    args = parser.parse_args()
    if max(args.pairs) > args.symbols:
        parser.error(f"{max(args.pairs)} pairs need as many different keys: --symbols is less")

    columns = (
        "loss {task.fields[loss]:.3f}",
        "right {task.fields[right]:3.0%}",
        "{task.fields[speed]:,.0f} tok/s",
    )
    with progress_bar(*columns) as bar:
        accuracies = {mixer: train(mixer, args, bar) for mixer in args.mixers}
    plot(args.output, accuracies)

    print(f"{'pairs':>28}" + "".join(f"{pairs:7}" for pairs in args.pairs))
    for mixer, accuracy in accuracies.items():
        print(f"{mixer:>28}" + "".join(f"{right:7.0%}" for right in accuracy.values()))
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
