"""Every example runs, in a configuration that takes no time."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest


EXAMPLES = Path(__file__).parent.parent / "examples"


def start(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user would, and with what `conftest.py` puts into the environment."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def run(name: str, *arguments: str, folder: Path) -> str:
    """What it prints."""
    finished = start(name, *arguments, folder=folder)
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
    options = ("--mixers", "Retention", "--pairs", "2", "3", "--symbols", "4", "--steps", "2")
    options += ("--batch", "2", "--output", "plots/accuracy")
    output = run("recall.py", *SMALL, *options, folder=tmp_path)
    assert "Retention" in output
    assert "wrote plots/accuracy.png" in output
    assert (tmp_path / "plots" / "accuracy.png").stat().st_size > 0


def test_long_context(tmp_path):
    options = ("--length", "100", "--chunk-size", "32", "--lengths", "64", "--steps", "1")
    mixer = ("--mixer", "LinearAttention")  # the quickest to compile
    output = run("long_context.py", *SMALL, *options, *mixer, folder=tmp_path)
    assert "peak memory" in output
    assert (tmp_path / "long_context.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("train_lm.py --steps 0", "argument --steps: expected an integer of 1 or more, got '0'"),
        ("recall.py --rate -1", "argument --rate: expected a number above 0, got '-1'"),
        ("train_lm.py --size 12", "argument --size: expected a multiple of 8"),
        ("train_lm.py --text a-file --length 10", "a-file has 5 bytes of text"),
        ("train_lm.py --prompt=", "argument --prompt: expected some text"),
        ("long_context.py --text nonesuch", "argument --text: there is no nonesuch"),
        ("generate.py a-file", "no checkpoint of `train_lm.py` in a-file"),
        ("recall.py --pairs 100 --symbols 16", "100 pairs need as many different keys"),
        ("recall.py --output a-file/plot", "argument --output: "),
    ],
)
def test_wrong_arguments(command, complaint, tmp_path, monkeypatch, capsys):
    """They are told at once."""
    (tmp_path / "a-file").write_text("text\n")
    name, *arguments = command.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert stopped.value.code != 0
    assert complaint in capsys.readouterr().err + str(stopped.value)


def test_wrong_number_of_devices(tmp_path):
    """How many there are is set when JAX starts, so that this needs a process of its own."""
    finished = start("train_parallel.py", "--seq-shards", "3", folder=tmp_path)
    assert finished.returncode != 0
    assert "8 devices cannot be dealt out to 3 evenly" in finished.stderr
    assert "Traceback" not in finished.stderr
