"""Learn to repeat a token seen long ago: gated linear attention on associative recall.

Every sequence shows pairs of a key and a value, then asks for the value of one key. A state that
forgets at the wrong time cannot answer. Prints loss, accuracy and tokens per second.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import linrec


class Recall(eqx.Module):
    """Embedding, two layers of gated linear attention with residuals, read-out."""

    embedding: eqx.nn.Embedding
    layers: list[dict[str, eqx.nn.Linear]]
    norms: list[eqx.nn.RMSNorm]
    readout: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, vocabulary: int, width: int, heads: int, *, key: PRNGKeyArray):
        first, *keys, last = jax.random.split(key, 4)
        linear = lambda key: eqx.nn.Linear(width, width, key=key)
        names = ("query", "key", "value", "gate", "out")
        self.embedding = eqx.nn.Embedding(vocabulary, width, key=first)
        self.layers = [
            dict(zip(names, map(linear, jax.random.split(key, len(names))), strict=True))
            for key in keys
        ]
        self.norms = [eqx.nn.RMSNorm(width) for _ in keys]
        self.readout = eqx.nn.Linear(width, vocabulary, key=last)
        self.heads = heads

    def __call__(self, tokens: Int[Array, " seq"]) -> Float[Array, "seq vocabulary"]:
        x = jax.vmap(self.embedding)(tokens)
        # Each token also sees the one before it, so that a value knows its key.
        x = x + jnp.pad(x[:-1], ((1, 0), (0, 0)))[:, ::-1]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            split = lambda name, x, layer=layer: jax.vmap(layer[name])(x).reshape(
                len(x), self.heads, -1
            )
            y = jax.vmap(norm)(x)
            gates = jax.nn.log_sigmoid(split("gate", y) + 4)
            q, k, v = (split(name, y) for name in ("query", "key", "value"))
            o, _ = linrec.recurrent(q, k, v, gk=gates)
            x = x + jax.vmap(layer["out"])(o.reshape(x.shape))
        return jax.vmap(self.readout)(x)


def make_batch(key, batch: int, pairs: int, symbols: int):
    """Pairs `k v k v ...` and a last `k`; the answer is its `v`."""

    def one(key):
        key_order, key_values, key_query = jax.random.split(key, 3)
        names = jax.random.permutation(key_order, symbols)[:pairs]
        values = jax.random.randint(key_values, (pairs,), symbols, 2 * symbols)
        asked = jax.random.randint(key_query, (), 0, pairs)
        tokens = jnp.stack([names, values], 1).reshape(-1)
        return jnp.append(tokens, names[asked]), values[asked]

    return jax.vmap(one)(jax.random.split(key, batch))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--symbols", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    args = parser.parse_args()

    key_model, key_data = jax.random.split(jax.random.key(0))
    model = Recall(2 * args.symbols, args.width, args.heads, key=key_model)
    optimiser = optax.adam(optax.cosine_decay_schedule(3e-3, args.steps))
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def train(model, state, key):
        tokens, answers = make_batch(key, args.batch, args.pairs, args.symbols)

        def loss(model):
            logits = jax.vmap(model)(tokens)[:, -1]
            right = jnp.mean(jnp.argmax(logits, -1) == answers)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, answers)
            return jnp.mean(losses), right

        (value, right), gradients = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value, right

    texts = (
        "loss {task.fields[loss]:.3f}",
        "right {task.fields[right]:.0%}",
        "{task.fields[rate]:,.0f} tokens/s",
    )
    with Progress(BarColumn(), *map(TextColumn, texts), TimeElapsedColumn()) as progress:
        task = progress.add_task("train", total=args.steps, loss=0.0, right=0.0, rate=0.0)
        for key in jax.random.split(key_data, args.steps):
            start = time.perf_counter()
            model, state, value, right = train(model, state, key)
            value.block_until_ready()
            rate = args.batch * (2 * args.pairs + 1) / (time.perf_counter() - start)
            progress.update(task, advance=1, loss=float(value), right=float(right), rate=rate)
    print(f"accuracy {float(right):.0%} on {args.pairs} pairs; chance is {1 / args.symbols:.0%}")


if __name__ == "__main__":
    main()
