"""Every block of Python code in the README and the documentation runs."""

import re
from pathlib import Path

import jax
import pytest


ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_blocks(page):
    """The blocks of a page are one program. Users have neither x64 nor strict promotion on."""
    blocks = BLOCK.findall(page.read_text())
    with (
        jax.enable_x64(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        exec(compile("\n".join(blocks), str(page), "exec"), {})
