"""Trains a language model on bytes of text, and lets it write some.

The text is the source of the Python standard library, which every machine has. The model is set
beside a bigram model, which knows how often each byte follows each other byte. Writes a plot of
the loss and a checkpoint that `generate.py` and `serve.py` load. Takes about two minutes on two
cores.
"""

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
    existing,
    folder,
    make_model,
    make_parser,
    MIXERS,
    positive,
    progress_bar,
    read_text,
    save_model,
    some_text,
    text_printer,
)

import linrec


def bigram_loss(text: np.ndarray, batch: np.ndarray) -> float:
    """Nats per byte under the frequencies of pairs of bytes in the text, plus one each."""
    counts = np.ones((256, 256))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    log_probability = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -log_probability[batch[:, :-1], batch[:, 1:]].mean()


def cut(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Pieces of the text, with one token more than the model sees."""
    return np.stack([text[start : start + length + 1] for start in starts]).astype(np.int32)


def mean_loss(model: linrec.nn.LanguageModel, batch: jax.Array) -> jax.Array:
    """Nats per byte. Models are unbatched: a batch is a matter of `jax.vmap`."""
    losses, _ = jax.vmap(lambda tokens: model.loss(tokens[:-1], tokens[1:]))(batch)
    return jnp.mean(losses) / (batch.shape[1] - 1)


def train(model, text, held_out, args) -> tuple[linrec.nn.LanguageModel, list, dict]:
    """The trained model, the loss of every step, and the loss on held-out text by step."""
    schedule = optax.warmup_cosine_decay_schedule(0, args.rate, args.steps // 10, args.steps)
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=args.weight_decay)
    )
    trainable = linrec.nn.trainable(model)
    state = optimiser.init(eqx.filter(model, trainable))

    @eqx.filter_jit(donate="all")
    def step(model, state, batch):
        loss, gradient = eqx.filter_value_and_grad(mean_loss)(model, batch)
        parameters, gradient = (eqx.filter(x, trainable) for x in (model, gradient))
        updates, state = optimiser.update(gradient, state, parameters)
        return eqx.apply_updates(model, updates), state, loss

    evaluate = eqx.filter_jit(mean_loss)
    rng = np.random.default_rng(0)
    losses, held_out_losses = [], {}
    columns = ("loss {task.fields[loss]:.3f}", "{task.fields[speed]:,.0f} tok/s")
    with progress_bar(*columns) as bar:
        task = bar.add_task(args.mixer, total=args.steps, loss=float("nan"), speed=0.0)
        begin = time.perf_counter()
        for i in range(1, args.steps + 1):
            starts = rng.integers(len(text) - args.length - 1, size=args.batch)
            model, state, loss = step(model, state, cut(text, starts, args.length))
            losses.append(float(loss))
            if i == 1:
                begin = time.perf_counter()  # the first step compiles
            speed = (i - 1) * args.batch * args.length / (time.perf_counter() - begin)
            bar.update(task, advance=1, loss=np.mean(losses[-20:]), speed=speed)
            if i % max(args.steps // 5, 1) == 0 or i == args.steps:
                held_out_losses[i] = float(evaluate(model, held_out))
    return model, losses, held_out_losses


def plot(path: Path, mixer: str, losses: list, held_out_losses: dict, bigram: float) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(np.arange(len(losses)) + 1, losses, color="C0", alpha=0.25, linewidth=1)
    width = max(len(losses) // 25, 1)
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    axes.plot(np.arange(len(smooth)) + width, smooth, color="C0", label=f"{mixer}, training")
    axes.plot(*zip(*held_out_losses.items(), strict=True), "o", color="C1", label="held out")
    axes.axhline(bigram, color="0.4", linestyle="--", label="bigram model, held out")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--text",
        type=existing,
        help="a file or a folder to learn from (default: the Python standard library)",
    )
    parser.add_argument("--mixer", choices=MIXERS, default=MIXERS[0], help="of all layers")
    parser.add_argument("--size", type=channels, default=128, help="channels")
    parser.add_argument("--layers", type=at_least(1), default=2, help="layers of the model")
    parser.add_argument("--steps", type=at_least(1), default=400, help="of training")
    parser.add_argument("--batch", type=at_least(1), default=8, help="sequences in a step")
    parser.add_argument("--length", type=at_least(1), default=256, help="tokens of a sequence")
    parser.add_argument("--rate", type=positive, default=6e-3, help="of learning")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the optimiser")
    parser.add_argument("--prompt", type=some_text, default="def ", help="text to continue")
    parser.add_argument("--tokens", type=at_least(0), default=400, help="to write in the end")
    parser.add_argument("--output", type=folder, default="lm", help="for checkpoint and plot")
    args = parser.parse_args()

    text, held_out = read_text(args.text, args.length + 1)
    starts = np.linspace(0, len(held_out) - args.length - 1, 128, dtype=int)
    held_out = cut(held_out, starts, args.length)
    arguments = {"mixer": args.mixer, "size": args.size, "num_layers": args.layers}
    model = make_model(**arguments, key=jax.random.key(0))
    parameters = sum(x.size for x in jax.tree.leaves(eqx.filter(model, linrec.nn.trainable(model))))
    print(f"{len(text):,} bytes of text, a model of {parameters:,} parameters")

    model, losses, held_out_losses = train(model, text, held_out, args)
    bigram = bigram_loss(text, held_out)
    held_out_loss = held_out_losses[args.steps]
    print(f"held-out text: {held_out_loss:.3f} nats per byte; a bigram model's: {bigram:.3f}\n")
    save_model(args.output / "model.eqx", model, **arguments)
    plot(args.output / "loss.png", args.mixer, losses, held_out_losses, bigram)

    print(args.prompt, end="", flush=True)
    prompt = jnp.array(list(args.prompt.encode()))
    linrec.nn.generate(
        model, prompt, args.tokens, jax.random.key(1), top_p=0.95, callback=text_printer()
    )
    print(f"\n\nwrote {args.output / 'model.eqx'} and {args.output / 'loss.png'}")


if __name__ == "__main__":
    main()
