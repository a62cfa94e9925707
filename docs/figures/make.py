"""Draws the figures of the documentation: `python docs/figures/make.py`.

All of them are computed by linrec. Those of the examples are written by the examples themselves.
"""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

import linrec
from linrec import nn


HERE = Path(__file__).parent
MIB = 2**20

matplotlib.rcParams.update(
    {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "font.size": 9,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "linrec",  # the same file every time
    }
)


def save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / name, metadata={"Date": None}, dpi=100)
    print(f"wrote {HERE / name}")


def decay_masks() -> None:
    """With keys and queries of 1 and values that are unit vectors, the output is the mask."""
    T = 48
    ones = jnp.ones((T, 1, 1))
    values = jnp.eye(T)[:, None]
    random = jax.nn.log_sigmoid(2 * jax.random.normal(jax.random.key(0), (T, 1)))
    steps = jnp.arange(T)[:, None]
    kinds = {
        "no gate": {},
        "g_gamma = -0.1": {"g_gamma": jnp.array([-0.1])},
        "g, by token": {"g": random / 4},
        "gk: a channel that forgets": {"gk": jnp.full((T, 1, 1), -0.3)},
        "gk: one that remembers": {"gk": jnp.full((T, 1, 1), -0.02)},
        "g = -inf at tokens 16 and 32": {"g": jnp.where(steps % 16 == 0, -jnp.inf, -0.02)},
        "cu_seqlens = [0, 10, 30, 48]": {
            "g_gamma": jnp.array([-0.02]),
            "cu_seqlens": jnp.array([0, 10, 30, 48]),
        },
        "reverse=True": {"g_gamma": jnp.array([-0.1]), "reverse": True},
    }
    figure = Figure(figsize=(8.4, 4.5), layout="constrained")
    image = None
    for axes, (title, gates) in zip(figure.subplots(2, 4).flat, kinds.items(), strict=True):
        mask, _ = linrec.recurrent(ones, ones, values, softmax_scale=1.0, **gates)
        image = axes.imshow(mask[:, 0], cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(title, fontsize=8.5)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(True)
    figure.supxlabel("token that was written", fontsize=9)
    figure.supylabel("token that reads", fontsize=9)
    figure.colorbar(image, ax=figure.axes, label="what is left", shrink=0.6)
    save(figure, "decay-masks.svg")


def receptive_fields() -> None:
    """How much the last output changes with the inputs before, by distance, before training."""
    T, size, draws = 1024, 64, 8
    x = jax.random.normal(jax.random.key(0), (draws, T, size))
    cotangents = jax.random.normal(jax.random.key(1), (draws, size))
    key = jax.random.key(2)
    layers = {
        "LinearAttention": nn.LinearAttention(size, key=key),
        "GatedLinearAttention": nn.GatedLinearAttention(size, key=key),
        "Mamba2": nn.Mamba2(size, key_size=16, value_size=16, key=key),
        "HGRN2": nn.HGRN2(size, key_size=16, key=key),
        "Retention": nn.Retention(size, key=key),
        "LightningAttention": nn.LightningAttention(size, layer_idx=1, num_layers=4, key=key),
        "SlidingWindowAttention": nn.SlidingWindowAttention(size, window=64, key=key),
    }
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots()
    distance = np.arange(1, T)
    # In bins of about the same width on a logarithmic axis.
    edges = np.unique(np.geomspace(1, T, 40).astype(int))
    for name, layer in layers.items():

        @eqx.filter_jit
        def sensitivity(layer, x, cotangent):
            gradient = jax.grad(lambda x: layer(x)[0][-1] @ cotangent)(x)
            return jnp.linalg.norm(gradient, axis=-1)

        norms = jax.vmap(lambda x, c: sensitivity(layer, x, c))(x, cotangents)  # noqa: B023
        norms = np.sqrt(np.mean(np.square(norms), axis=0))[::-1][1:]
        total, _ = np.histogram(distance, edges, weights=norms)
        count, _ = np.histogram(distance, edges)
        mean = total / count
        seen = mean > 0
        axes.plot(edges[:-1][seen], mean[seen] / mean[0], label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(1e-4, 3)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set(xlabel="tokens back", ylabel="influence, that of one token back = 1")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "receptive-fields.svg")


def head_decays() -> None:
    """Fixed decays: what is left of a token, by distance and head."""
    distance = np.arange(1, 1025)
    kinds = {
        "Retention": np.log1p(-(2.0 ** (-5 - np.arange(4)))),
        "LightningAttention, linear slopes": np.asarray(linrec.lightning_decay(4, 1, 4)),
        "LightningAttention, geometric": np.asarray(
            nn.LightningAttention(
                64, 4, layer_idx=1, num_layers=4, slopes="geometric", key=jax.random.key(0)
            ).decay
        ),
    }
    figure = Figure(figsize=(8.4, 2.8), layout="constrained")
    for axes, (name, decays) in zip(figure.subplots(1, 3, sharey=True), kinds.items(), strict=True):
        for head, decay in enumerate(decays):
            axes.plot(distance, np.exp(decay * distance), color=f"C{head}", label=f"head {head}")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("tokens back")
    figure.axes[0].set_ylabel("what is left")
    figure.axes[0].legend(fontsize=8)
    save(figure, "head-decays.svg")


def memory() -> None:
    """What programs allocate beside their inputs and outputs, as XLA reports it."""
    H, K = 4, 64
    lengths = [2**n for n in range(10, 19, 2)]
    ways = {
        "Scan": {"method": linrec.Scan()},
        "Chunked": {"method": linrec.Chunked()},
        "Chunked, chunk_size=4096": {"chunk_size": 4096},
    }

    def temporaries(length: int, options: dict) -> float:
        x = jax.ShapeDtypeStruct((1, length, H, K), jnp.float32)

        def loss(q, k, v, gk):
            return jnp.sum(linrec.recurrent(q, k, v, gk=gk, **options)[0])

        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes / MIB

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    training, decoding = figure.subplots(1, 2)
    for name, options in ways.items():
        used = [temporaries(length, options) for length in lengths]
        training.plot(lengths, used, marker="o", label=name)
        print(f"{name:>26}: {', '.join(f'{x:.1f}' for x in used)} MiB")
    training.set_title(f"gradient of the recurrence, {H} heads of {K} x {K}", fontsize=9)
    training.set_ylabel("temporary MiB")

    layer = nn.GatedLinearAttention(H * K, H, key_size=K, key=jax.random.key(0))
    state = sum(x.nbytes for x in jax.tree.leaves(layer.state)) / MIB
    cache = [length * H * 2 * K * 4 / MIB for length in lengths]
    decoding.plot(lengths, cache, "--", color="0.5", label="keys and values of softmax attention")
    decoding.plot(lengths, [state] * len(lengths), marker="o", label="state of the recurrence")
    decoding.set_title("what decoding one text keeps, in one layer", fontsize=9)
    decoding.set_ylabel("MiB")
    for axes in (training, decoding):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("tokens")
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    save(figure, "memory.svg")


if __name__ == "__main__":
    decay_masks()
    head_decays()
    receptive_fields()
    memory()
