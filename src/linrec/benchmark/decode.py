"""Decoding: the bandwidth on the state that one step reaches, against a copy of the state."""

import argparse
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import linrec
from linrec import nn

from ._options import add_output_option, at_least, refuse
from ._report import print_table, progress, write_json, write_row_of_bars
from ._timing import interleave


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option, default, meaning in (
        ("--batch", 64, "texts"),
        ("--num-heads", 8, "heads"),
        ("--key-size", 128, "of a head"),
        ("--value-size", 128, "of a head"),
        ("--size", 64, "channels of the layers' input"),
        ("--rounds", 20, "of timing"),
    ):
        parser.add_argument(
            option, type=at_least(1), default=default, help=f"{meaning} (default: %(default)s)"
        )
    add_output_option(parser)


def main(args: argparse.Namespace) -> None:
    try:
        layers = _layers(args)
    except ValueError as error:  # sizes that some layer cannot have
        refuse(error)
    calls: dict[str, Callable[[], object]] = {"copy": _copy(args), "linrec.step": _step(args)}
    for layer in layers:
        for position in (0, 1_000_000):
            calls[f"{type(layer).__name__} at token {position:,}"] = _layer_step(
                layer, args.batch, position
            )
    with progress(len(calls) + 1) as step:
        for name, call in calls.items():
            step(f"compiling {name}")
            call()
        step("timing")
        timings = interleave(calls, args.rounds, budget=30.0)
    state_bytes = args.batch * args.num_heads * args.key_size * args.value_size * 4
    copy = timings["copy"]
    records = [
        {
            "name": name,
            "seconds": timing.minimum,
            "median_seconds": timing.median,
            "bandwidth": 2 * state_bytes / timing.minimum,
            "of_copy": copy.minimum / timing.minimum,
            "median_of_copy": copy.median / timing.median,
        }
        for name, timing in timings.items()
    ]
    _print(args, records)
    arguments = {name: value for name, value in vars(args).items() if isinstance(value, int)}
    write_json(args.output / "decode.json", "decode", [arguments | r for r in records])
    bars = {name: timing.minimum * 1e3 for name, timing in timings.items()}
    write_row_of_bars(args.output / "decode.png", _title(args), bars, "ms")


def _print(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    rows = [
        (
            record["name"],
            f"{record['seconds'] * 1e3:.2f}",
            f"{record['median_seconds'] * 1e3:.2f}",
            f"{record['bandwidth'] / 1e9:.1f}",
            f"{record['of_copy']:.0%} (median {record['median_of_copy']:.0%})",
        )
        for record in records
    ]
    print_table(_title(args), ("", "ms", "median ms", "GB/s on the state", "of a copy"), rows)


def _title(args: argparse.Namespace) -> str:
    return (
        f"One token of {args.batch} texts, {args.num_heads} heads of "
        f"({args.key_size}, {args.value_size}), state donated"
    )


def _state(args: argparse.Namespace) -> jax.Array:
    shape = (args.batch, args.num_heads, args.key_size, args.value_size)
    return jax.random.normal(jax.random.key(0), shape, jnp.float32)


def _copy(args: argparse.Namespace) -> Callable[[], None]:
    """What the memory does at best: the state read once and written once, to pages in use."""
    source = np.asarray(_state(args))
    target = np.copy(source)
    return lambda: np.copyto(target, source)


def _step(args: argparse.Namespace) -> Callable[[], None]:
    rows = (args.batch, args.num_heads)
    query, key, gate = jax.random.normal(jax.random.key(1), (3, *rows, args.key_size))
    value = jax.random.normal(jax.random.key(2), (*rows, args.value_size))
    step = lambda state, *token: linrec.step(state, *token[:3], gk=-jnp.abs(token[3]))
    return _decoder(step, _state(args), query, key, value, gate)


def _layers(args: argparse.Namespace) -> list[nn.AbstractMixer]:
    sizes = {"num_heads": args.num_heads, "key_size": args.key_size, "value_size": args.value_size}
    sizes["key"] = jax.random.key(0)
    return [
        nn.LinearAttention(args.size, normalise=False, **sizes),
        nn.GatedLinearAttention(args.size, **sizes),
        nn.SimpleGatedLinearAttention(args.size, **sizes),
        nn.LightningAttention(args.size, layer_idx=0, num_layers=2, **sizes),
        nn.Retention(args.size, **sizes),
        nn.HGRN2(args.size, **sizes),
        nn.Mamba2(args.size, **sizes),
    ]


def _layer_step(layer: nn.AbstractMixer, batch: int, position: int) -> Callable[[], None]:
    x = jax.random.normal(jax.random.key(3), (batch, layer.size))
    state = jax.tree.map(lambda s: jnp.broadcast_to(s, (batch, *s.shape)), layer.state)
    state = eqx.tree_at(lambda s: s.position, state, jnp.full((batch,), position, jnp.int32))
    step = lambda state, x: jax.vmap(lambda x, state: layer.step(x, state))(x, state)
    return _decoder(step, state, x)


def _decoder(step: Callable[..., Any], state: Any, *token: jax.Array) -> Callable[[], None]:
    """Decodes one token with each call. The state's memory is used again every time.

    The token is an argument: of a constant, XLA would compute the projections when it compiles.
    """
    compiled = jax.jit(step, donate_argnums=0)

    def decode() -> None:
        nonlocal state
        _, state = jax.block_until_ready(compiled(state, *token))

    return decode
