"""`python -m linrec`."""

import re

import pytest

from linrec.__main__ import advise, main


@pytest.mark.parametrize(("dtype", "on_gpu"), [("bfloat16", "Triton()"), ("float64", "Chunked()")])
def test_report(dtype, on_gpu, capsys):
    main(["--shape", "2,100,4,16,8", "--gate", "g", "--dtype", dtype])
    report = capsys.readouterr().out
    for title in ("linrec", "packages", "devices", "Triton", "Auto"):
        assert re.search(f"^{title} ", report, re.MULTILINE)
    assert f"for (2, 100, 4, 16, 8), gate g, {dtype}:" in report
    assert "on a CPU: Chunked()" in report
    assert f"on a GPU: {on_gpu}" in report


def test_bad_shape(capsys):
    with pytest.raises(SystemExit):
        main(["--shape", "1,2"])
    assert "expected batch,seq,heads,key,value" in capsys.readouterr().err


HEALTHY = {"on_gpu": True, "driver": 12, "platforms": "", "plugins": [], "problem": None}


@pytest.mark.parametrize(
    ("facts", "diagnosis", "command"),
    [
        ({}, "available", None),
        ({"on_gpu": False, "driver": 0}, "no GPU to run", None),
        ({"problem": "triton is not installed"}, "triton is not", 'install "linrec[cuda12]"'),
        ({"on_gpu": False}, "JAX does not find it", 'install "linrec[cuda12]"'),
        ({"on_gpu": False, "driver": 13}, "JAX does not find it", 'install "linrec[cuda13]"'),
        ({"on_gpu": False, "platforms": "cpu"}, "told to use cpu", "unset JAX_PLATFORMS"),
        (
            {"on_gpu": False, "driver": 0, "problem": "triton is not installed"},
            "there is no GPU, and triton is not",
            'install "linrec[cuda12]"',
        ),
        (
            {"plugins": ["jax-cuda12-plugin", "jax-cuda13-plugin"]},
            "do not go together",
            "pip uninstall jax-cuda12-plugin",
        ),
    ],
)
def test_advice(facts, diagnosis, command):
    first, *others = advise(**HEALTHY | facts)
    assert diagnosis in first
    assert (command is None) == (not others)
    assert command is None or command in others[-1]
