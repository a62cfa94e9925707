"""What the examples share: arguments, mixers by name, text, checkpoints, a progress bar."""

import argparse
import codecs
import json
import math
import random
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PRNGKeyArray
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import linrec


MIXERS = (
    "GatedLinearAttention",
    "SimpleGatedLinearAttention",
    "Mamba2",
    "HGRN2",
    "Retention",
    "LightningAttention",
    "LinearAttention",
    "SlidingWindowAttention",
)
VOCAB = 256  # a token is a byte


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it is written, and every default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default is None or "(default: " in (action.help or "")
        return action.help if told else super()._get_help_string(action)


def make_parser(description: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(description=description, formatter_class=_Help)


# Types of arguments, for `argparse`.
def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected an integer of {least} or more, got {text!r}"
            )
        return int(text)

    return parse


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def channels(text: str) -> int:
    """That make four heads of an even size, as layers with rotations want it."""
    if at_least(8)(text) % 8 != 0:
        raise argparse.ArgumentTypeError(f"expected a multiple of 8, got {text!r}")
    return int(text)


def some_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected some text")
    return text


def existing(text: str) -> Path:
    if not Path(text).exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return Path(text)


def folder(text: str) -> Path:
    """Made at once: not to fail when everything is done."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def plot_file(text: str) -> Path:
    """In a folder that is made at once. Without an ending it is a PNG, as matplotlib would do."""
    path = Path(text)
    folder(str(path.parent))
    return path if path.suffix else path.with_suffix(".png")


def make_model(
    mixer: str, size: int, num_layers: int, vocab_size: int = VOCAB, *, key: PRNGKeyArray
) -> linrec.nn.LanguageModel:
    """A language model whose layers are all of one kind, with four heads of the same size."""
    head_size = size // 4

    def make_mixer(layer_idx: int, key: PRNGKeyArray) -> linrec.nn.AbstractMixer:
        options = {"num_heads": 4, "key_size": head_size, "value_size": head_size}
        if mixer == "SlidingWindowAttention":
            options["window"] = 64
        else:
            options["conv_size"] = 4
        if mixer == "LightningAttention":
            options |= {"layer_idx": layer_idx, "num_layers": num_layers}
        if mixer == "HGRN2":
            options["lower_bound"] = layer_idx / num_layers
        return getattr(linrec.nn, mixer)(size, **options, key=key)

    return linrec.nn.LanguageModel(make_mixer, num_layers, vocab_size, key=key)


def read_text(path: Path | None, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and bytes held out: the last twentieth. At least `length` of each.

    Those of a file, of all files in a folder, or of the Python standard library's own modules.
    """
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    else:
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    random.Random(0).shuffle(files)
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    cut = len(text) * 19 // 20
    if len(text) - cut < length:
        raise SystemExit(
            f"{path or 'the standard library'} has {len(text):,} bytes of text, of which the last "
            f"twentieth is held out: {length:,} at least are needed there"
        )
    return text[:cut], text[cut:]


def save_model(path: Path, model: linrec.nn.LanguageModel, **arguments) -> None:
    """A line with the arguments of `make_model`, then the arrays."""
    with path.open("wb") as file:
        file.write(json.dumps(arguments).encode() + b"\n")
        eqx.tree_serialise_leaves(file, model)


def load_model(path: Path) -> linrec.nn.LanguageModel:
    try:
        with path.open("rb") as file:
            arguments = json.loads(file.readline())
            like = eqx.filter_eval_shape(make_model, **arguments, key=jax.random.key(0))
            return eqx.tree_deserialise_leaves(file, like)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"no checkpoint of `train_lm.py` in {path}: {error}") from error


def progress_bar(*columns: str) -> Progress:
    """A bar, and columns such as `"loss {task.fields[loss]:.3f}"` beside it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(None),
        TextColumn("{task.percentage:3.0f}%"),
        *map(TextColumn, columns),
        TimeElapsedColumn(),
        expand=True,
    )


def text_printer() -> Callable[[np.ndarray], None]:
    """Prints text as its bytes come in. A character may be several of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(token: np.ndarray) -> None:
        sys.stdout.write(decoder.decode(bytes([int(token)])))
        sys.stdout.flush()

    return show
