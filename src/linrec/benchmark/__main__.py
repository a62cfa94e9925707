"""`python -m linrec.benchmark COMMAND`.

A command is a module of this package with a docstring, `add_arguments(parser)` and
`main(args) -> int | None`, the exit status.
"""

import argparse
import importlib
import multiprocessing
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from types import ModuleType


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m linrec.benchmark", description=_first_line(_package())
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands = {}
    for name in _command_names():
        module = importlib.import_module(f"{_package().__name__}.{name}")
        subparser = subparsers.add_parser(name, help=_first_line(module))
        module.add_arguments(subparser)
        commands[name] = (subparser, module)
    subparsers.add_parser("all", help="All of them. Each takes those options that it has.")

    args, rest = parser.parse_known_args(argv)
    _require("rich", "matplotlib")
    if args.command != "all":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return commands[args.command][1].main(args) or 0
    parsed = {name: subparser.parse_known_args(rest) for name, (subparser, _) in commands.items()}
    unused = ({x for x in unused if x.startswith("-")} for _, unused in parsed.values())
    unknown = set.intersection(*unused)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(sorted(unknown))}")
    return max(_run_apart(commands[name][1], args) for name, (args, _) in parsed.items())


def _run_apart(module: ModuleType, args: argparse.Namespace) -> int:
    """In a process of its own: flags are read, and memory is counted, once in a process."""
    print(f"\n{module.__name__}", flush=True)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        run = pool.submit(module.main, args)
    if error := run.exception():  # the others are run all the same
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        return 1
    return run.result() or 0


def _package() -> ModuleType:
    return importlib.import_module("linrec.benchmark")


def _command_names() -> list[str]:
    modules = (module.name for module in pkgutil.iter_modules(_package().__path__))
    return [name for name in modules if not name.startswith("_")]


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").partition("\n")[0]


def _require(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise SystemExit(
            f"The benchmark needs {' and '.join(missing)}. Install what it needs with:\n\n"
            '    pip install "linrec[benchmark]"'
        )


if __name__ == "__main__":
    sys.exit(main())
