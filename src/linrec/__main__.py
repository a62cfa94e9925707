"""`python -m linrec`: what is installed, which devices there are, and what runs on them."""

import argparse
import importlib
import os
import platform
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

import linrec

from ._inputs import canonicalise
from .benchmark._cases import Case, DTYPES, GATES, parse_shape


_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")
_PACKAGES = ("jax", "jaxlib", "equinox", "triton", "jax-triton", *_PLUGINS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m linrec", description=__doc__)
    parser.add_argument(
        "--shape",
        type=parse_shape,
        default=(1, 4096, 4, 64, 64),
        metavar="B,T,H,K,V",
        help="to choose a method for (default: 1,4096,4,64,64)",
    )
    parser.add_argument("--gate", choices=GATES, default="gk", help="(default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=(*DTYPES, "float64"),
        default="float32",
        help="(default: %(default)s)",
    )
    args = parser.parse_args(argv)

    versions = (f"{name} {_version(name)}" for name in _PACKAGES if _version(name))
    _show("linrec", f"{linrec.__version__}, Python {platform.python_version()}")
    _show("packages", ", ".join(versions))
    devices = Counter(device.device_kind for device in jax.devices())
    _show("devices", *(f"{count} x {kind}" for kind, count in devices.items()))
    advice = advise(
        on_gpu=jax.default_backend() == "gpu",
        driver=_driver(),
        platforms=os.environ.get("JAX_PLATFORMS", ""),
        plugins=[name for name in _PLUGINS if _version(name)],
        problem=_import_problem(),
    )
    _show("Triton", *advice)
    _show("Auto", *_choices(Case(args.shape, args.gate, args.dtype)))


def _show(title: str, *lines: str) -> None:
    for line in lines:
        print(f"{title:10}{line}")
        title = ""


def advise(
    *, on_gpu: bool, driver: int, platforms: str, plugins: Sequence[str], problem: str | None
) -> Iterator[str]:
    """Whether the kernels run here; if not, why, and which command mends it."""
    extra = "cuda13" if _PLUGINS[1] in plugins or driver >= 13 else "cuda12"
    install = f'    pip install "linrec[{extra}]"'
    if len(plugins) == 2:
        yield f"not available: {' and '.join(plugins)} do not go together. Keep one of them:"
        yield f"    pip uninstall {plugins[0]}"
    elif driver and not on_gpu and platforms:
        yield f"not available: there is an NVIDIA GPU, but JAX is told to use {platforms}. Undo it:"
        yield "    unset JAX_PLATFORMS"
    elif driver and not on_gpu:
        yield "not available: there is an NVIDIA GPU, but JAX does not find it. Install:"
        yield install
    elif problem is not None and on_gpu:
        yield f"not available: {problem}. Install:"
        yield install
    elif problem is not None:
        yield f"not available: there is no GPU, and {problem}."
        yield "To compile programs for a GPU all the same, install:"
        yield install
    elif on_gpu:
        yield "available"
    else:
        yield "there is no GPU to run the kernels; programs can be compiled for one"


def _import_problem() -> str | None:
    for package in ("triton", "jax-triton"):
        if _version(package) is None:
            return f"{package} is not installed"
    try:
        importlib.import_module("jax_triton")
    except ImportError as error:
        return f"jax-triton cannot be imported ({error})"
    return None


def _choices(case: Case) -> Iterator[str]:
    """Shapes and dtypes are all that counts: it is asked while tracing, and no array is made."""
    platforms = dict.fromkeys((jax.default_backend(), "gpu"))

    def ask() -> None:
        arguments: dict[str, Any] = case.inputs()
        inputs, _ = canonicalise("linrec.recurrent", **arguments)
        for name in platforms:
            platforms[name] = linrec.Auto().select(inputs, name)

    with jax.enable_x64(True):  # or float64 would be asked about as float32
        jax.eval_shape(ask)
    yield f"for {case}:"
    for name, method in platforms.items():
        yield f"    on a {name.upper()}: {method}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> int:
    """The newest CUDA that the driver of an NVIDIA GPU knows; 0 without one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    answer = subprocess.run([program], capture_output=True, text=True, check=False).stdout
    found = re.search(r"CUDA Version: (\d+)", answer)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
