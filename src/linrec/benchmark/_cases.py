"""The problems that are run: a shape, a dtype, a gate, and the inputs made of them."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


# By the names of the arguments of `linrec.recurrent`.
GATES = {
    "none": (),
    "g": ("g",),
    "g_gamma": ("g_gamma",),
    "gk": ("gk",),
    "gv": ("gv",),
    "all": ("g", "g_gamma", "gk", "gv"),
}
# Of GLA. Divided by less, gates get too strong for chunks to be factorised.
NORMALISER = 16.0
DTYPES = ("float32", "bfloat16", "float16")

SHAPES = ((1, 2048, 4, 64, 64), (2, 4096, 8, 128, 128), (1, 16384, 4, 64, 64))


class Case(NamedTuple):
    """One problem. `shape` is `(B, T, H, K, V)`; gates of tokens are divided by `normaliser`."""

    shape: tuple[int, int, int, int, int]
    gate: str
    dtype: str = "float32"
    normaliser: float = NORMALISER

    def __str__(self) -> str:
        return f"{self.shape}, gate {self.gate}, {self.dtype}"

    @property
    def gates(self) -> tuple[str, ...]:
        return GATES[self.gate]

    @property
    def length(self) -> int:
        return self.shape[1]

    def inputs(self) -> dict[str, Array]:
        """Arguments of `linrec.recurrent`, with gates as strong as models have them."""
        B, T, H, K, V = self.shape
        shapes = {
            "query": (B, T, H, K),
            "key": (B, T, H, K),
            "value": (B, T, H, V),
            "g": (B, T, H),
            "g_gamma": (H,),
            "gk": (B, T, H, K),
            "gv": (B, T, H, V),
        }
        inputs = {}
        for i, name in enumerate(shapes):
            if name not in ("query", "key", "value", *self.gates):
                continue
            x = jax.random.normal(jax.random.key(i), shapes[name], jnp.float32)
            if name == "key":
                x = x * K**-0.5
            elif name == "g_gamma":  # the decays of RetNet
                x = jnp.log1p(-jnp.exp2(-5 - jnp.arange(H, dtype=jnp.float32) * 4 / H))
            elif name.startswith("g"):  # the gates of GLA
                x = jax.nn.log_sigmoid(x) / self.normaliser
            # The gates of a model in half precision are float32.
            inputs[name] = x if name in self.gates else x.astype(self.dtype)
        return inputs

    def cotangent(self) -> Array:
        """What the output's gradient is taken along."""
        B, T, H, _, V = self.shape
        return jax.random.normal(jax.random.key(7), (B, T, H, V), jnp.float32).astype(self.dtype)


def write_shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    """As they are written on the command line."""
    return " ".join(",".join(map(str, shape)) for shape in shapes)


def parse_shape(text: str) -> tuple[int, ...]:
    """`"1,2048,4,64,64"` as a shape, for `argparse`."""
    try:
        shape = tuple(int(size) for size in text.split(","))
    except ValueError:
        shape = ()
    if len(shape) != 5 or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"expected batch,seq,heads,key,value, got {text!r}")
    return shape
