"""Every block of Python code in the README, the documentation and the docstrings runs."""

import inspect
import re
import runpy
import textwrap
from pathlib import Path

import jax
import pytest

import linrec


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^ *```python\n(.*?)```", re.DOTALL | re.MULTILINE)
PUBLIC = {**vars(linrec.nn), **vars(linrec)}
DOCSTRINGS = {name: inspect.getdoc(x) or "" for name, x in PUBLIC.items() if callable(x)}


def run(text: str, name: str) -> None:
    """The blocks are one program. Users have neither x64 nor strict promotion on."""
    program = "\n".join(map(textwrap.dedent, BLOCK.findall(text)))
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        exec(compile(program, name, "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages(page):
    run(page.read_text(), str(page))


@pytest.mark.parametrize("name", [name for name, doc in DOCSTRINGS.items() if "```python" in doc])
def test_docstrings(name):
    run(DOCSTRINGS[name], name)


def test_results():
    """The tables of `benchmarks.md` are those of the files in `docs/results`."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert runpy.run_path(str(ROOT / "docs" / "results" / "tables.py"))["fill"](page) == page
