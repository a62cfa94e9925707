"""Every example runs, in a configuration that takes no time."""

import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, folder: Path) -> str:
    """As a user would, and with what `conftest.py` puts into the environment."""
    finished = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


SMALL = ("--size", "16", "--layers", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """The folder, and what was printed."""
    folder = tmp_path_factory.mktemp("lm")
    options = ("--steps", "3", "--batch", "2", "--length", "32", "--tokens", "5")
    return folder, run("train_lm.py", *SMALL, *options, folder=folder)


def test_train_lm(trained):
    folder, output = trained
    assert "a bigram model's: 2." in output
    assert (folder / "lm" / "loss.png").stat().st_size > 0


def test_generate(trained):
    folder, _ = trained
    output = run("generate.py", "--prompt", "def f", "--tokens", "7", folder=folder)
    assert output.startswith("def f")
    assert "7 tokens" in output


def test_serve(trained):
    folder, _ = trained
    options = ("--requests", "5", "--rate", "1000", "--slots", "2")
    options += ("--prompt", "9", "--tokens", "4", "--buffer", "16")
    output = run("serve.py", "lm/model.eqx", *options, folder=folder)
    assert "5 requests" in output
    assert "every answer equals that of decoding alone" in output


def test_recall(tmp_path):
    options = ("--mixers", "Retention", "--pairs", "2", "3", "--symbols", "4")
    output = run("recall.py", *SMALL, *options, "--steps", "2", "--batch", "2", folder=tmp_path)
    assert "Retention" in output
    assert (tmp_path / "recall.png").stat().st_size > 0


def test_long_context(tmp_path):
    options = ("--length", "100", "--chunk-size", "32", "--lengths", "64", "--steps", "1")
    output = run("long_context.py", *SMALL, *options, folder=tmp_path)
    assert "peak memory" in output
    assert (tmp_path / "long_context.png").stat().st_size > 0
