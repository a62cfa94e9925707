"""The benchmark end to end, on problems that take no time."""

import json
import time
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from linrec.benchmark import __main__, decode, speed
from linrec.benchmark.__main__ import main
from linrec.benchmark._cases import Case
from linrec.benchmark._check import Problem
from linrec.benchmark._contestants import BASELINE, CHUNK_SCAN, Contestant, linrec_method
from linrec.benchmark._timing import interleave
from linrec.benchmark.parallel import CONTESTANTS


TINY = ["--shapes", "1,64,1,4,2", "--gates", "gk"]


def read(path):
    return json.loads(path.read_text())["records"]


def test_speed(tmp_path):
    options = ["--repeats", "2", "--methods", "chunked:16", "--peers", "softmax"]
    assert main(["speed", *TINY, *options, "--output", str(tmp_path)]) == 0
    records = read(tmp_path / "speed.json")
    names = {record["contestant"] for record in records}
    assert names == {"lax.scan", "chunk scan", "chunk floor", "linrec chunked:16", "softmax"}
    assert len(records) == 2 * len(names)
    for record in records:
        assert (record["problem"] is None) == (record.get("ms", 0) > 0)
        if record["contestant"].startswith("linrec"):
            assert record["error"] < 1e-5
            assert record["times_as_fast"] > 0
    assert (tmp_path / "speed-float32.png").stat().st_size > 0


def test_memory(tmp_path, capsys):
    options = ["--lengths", "64", "128", "--chunk-size", "32", "--methods", "scan"]
    assert main(["memory", *TINY, *options, "--output", str(tmp_path)]) == 0
    temp_bytes = {
        (r["pass"], r["contestant"]): r["temp_bytes"] for r in read(tmp_path / "memory.json")
    }
    assert temp_bytes["forward+backward", "lax.scan"] > temp_bytes["forward", "lax.scan"] > 0
    growth = read(tmp_path / "growth.json")
    assert [r["shape"][1] for r in growth] == [64, 128]
    assert [r["state_bytes"] for r in growth] == [2 * 4 * 2 * 4, 4 * 4 * 2 * 4]
    assert "linrec scan" in capsys.readouterr().out
    assert (tmp_path / "memory.png").exists()
    assert (tmp_path / "growth.png").exists()


@cache
def _problem():
    return Problem.of(Case((1, 8, 1, 4, 2), "gk"))


def _right(inputs):
    return linrec_method("scan").run(inputs)


def _without_gradient_of_key(inputs):
    return _right(inputs | {"key": jax.lax.stop_gradient(inputs["key"])})


def _fails(inputs):
    raise RuntimeError("out of luck\nand more")


@pytest.mark.parametrize(
    ("run", "forward", "both"),
    [
        (_right, None, None),
        (lambda inputs: _right(inputs) * 1.01, "wrong: output", "wrong: "),
        (lambda inputs: _right(inputs) * jnp.nan, "wrong: output off by inf", "wrong: "),
        (lambda inputs: _right(inputs)[:, :-1], "wrong: output off by inf", "fails: "),
        (_without_gradient_of_key, None, "wrong: gradient of key off by 1.0e+00"),
        (_fails, "fails: RuntimeError: out of luck", "fails: RuntimeError: out of luck"),
    ],
)
def test_only_right_answers_are_timed(run, forward, both):
    problem = _problem()
    for which, expected in (("forward", forward), ("forward+backward", both)):
        verdict = problem.judge(Contestant("someone", run), which, memory_limit=1e9)
        assert (verdict.program is None) == (expected is not None)
        assert (verdict.problem or "").startswith(expected or "")
        assert (verdict.problem is None) == (expected is None)


def test_wrong_contestant_in_a_run(tmp_path, monkeypatch, capsys):
    wrong = Contestant("linrec wrong", lambda inputs: -_right(inputs))
    monkeypatch.setattr(speed, "choose", lambda methods, peers: [BASELINE, wrong])
    status = main(["speed", *TINY, "--repeats", "1", "--output", str(tmp_path)])
    assert status == 1
    for record in read(tmp_path / "speed.json"):
        assert ("ms" in record) == (record["contestant"] == "lax.scan")
        assert ("ms" in record) == (record["problem"] is None)
    assert "wrong: " in capsys.readouterr().out


def test_what_does_not_fit_is_not_run():
    verdict = _problem().judge(BASELINE, "forward+backward", memory_limit=1.0)
    assert verdict.program is None
    assert "needs" in verdict.problem


def test_interleave():
    order = []
    calls = {name: partial(_call, order, name, 0.06) for name in ("one", "other")}
    timings = interleave(calls, rounds=3, budget=0.1)
    assert order == ["one", "other"] * 2
    assert all(timing.minimum >= 0.06 for timing in timings.values())
    assert all(timing.median >= timing.minimum for timing in timings.values())


def _call(order, name, seconds):
    order.append(name)
    time.sleep(seconds)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("all --nonesuch", "unrecognized arguments: --nonesuch"),
        ("speed --repeats 0", "argument --repeats: expected an integer of 1 or more, got '0'"),
        ("speed --normaliser 0", "argument --normaliser: expected a number above 0, got '0'"),
        ("speed --budget nan", "argument --budget: expected a number above 0, got 'nan'"),
        ("speed --methods nonesuch", "argument --methods: expected one of auto, chunked, "),
        ("speed --methods chunked:abc", "got 'chunked:abc'"),
        ("speed --methods chunked:100", "expects a power of two"),
        ("speed --methods segmented", "'chunk_size'"),
        ("speed --methods sequenceparallel", "there is no such method"),
        ("speed --peers nonesuch", "argument --peers: invalid choice: 'nonesuch'"),
        ("speed --output a-file/folder", "argument --output: "),
        ("memory --lengths 1000 -5", "argument --lengths: "),
        ("decode --batch -1", "argument --batch: "),
        ("decode --key-size 33", "`key_size` has to be even"),
        ("long --mixer Nonesuch", "argument --mixer: "),
        ("long --size 33", "33 channels cannot be dealt out"),
        ("parallel --many 1", "argument --many: "),
        ("parallel --lengths 100", "argument --lengths: expected multiples of 8 devices"),
    ],
)
def test_wrong_arguments(command, complaint, tmp_path, monkeypatch, capsys):
    """They are told before anything is measured."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a-file").touch()
    with pytest.raises(SystemExit) as stop:
        main(command.split())
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_all(tmp_path, monkeypatch):
    monkeypatch.setattr(__main__, "_command_names", lambda: ["decode", "speed"])
    monkeypatch.setattr(decode, "main", int)  # which fails; the other runs all the same
    options = [*TINY, "--repeats", "1", "--rounds", "1", "--output", str(tmp_path)]
    assert main(["all", *options]) == 1
    assert {r["gate"] for r in read(tmp_path / "speed.json")} == {"gk"}


def test_missing_extra(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(__main__, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r'pip install "linrec\[benchmark\]"'):
        main(["speed"])


def test_baselines_are_right():
    problem = Problem.of(Case((2, 128, 2, 4, 3), "all", "bfloat16"))
    for contestant in (BASELINE, CHUNK_SCAN):
        verdict = problem.judge(contestant, "forward+backward", memory_limit=1e9)
        assert verdict.problem is None


def test_kernels(tmp_path):
    """Compiled without spilling, and moving no more than they should."""
    options = ["--gates", "gk", "--targets", "sm_80", "--sizes", "128"]
    assert main(["kernels", *options, "--step-shapes", "--output", str(tmp_path)]) == 0
    records = read(tmp_path / "kernels.json")
    resources = [r for r in records if r["what"] == "resources"]
    assert len(resources) == 6
    for record in resources:
        assert record["spilled_bytes"] == 0
        if record["kernel"] in ("output", "d_key", "d_value"):
            assert record["blocks_per_sm"] >= 2
            assert record["tensor_core_instructions"] > 0
    passes = {(r["gate"], r["kernel"]): r for r in records if r["what"] == "work"}
    moved = lambda r: (r["bytes_read"] + r["bytes_written"]) / 1e6
    for kernels, launches, megabytes in (("forward", 2, 3.1), ("backward", 3, 7.9)):
        assert passes["gk", kernels]["launches"] == launches
        assert moved(passes["gk", kernels]) < megabytes


def test_parallel(tmp_path, capsys):
    sizes = ["--heads", "1", "--channels", "8", "--lengths", "16", "32", "--many", "16"]
    assert main(["parallel", *sizes, "--devices", "4", "--output", str(tmp_path)]) == 0
    records = read(tmp_path / "parallel.json")
    state_and_decay = 4 * (8 * 8 + 8 + 1)
    received = {
        (r["contestant"], r["devices"], r["length"], r["pass"]): r["received_bytes"]
        for r in records
        if "pass" in r
    }
    for length in (16, 32):
        assert received["linrec, all_gather", 4, length, "forward"] == 3 * state_and_decay
        assert received["ring attention", 4, length, "forward"] == 4 * 3 * length // 4 * 2 * 8
    assert received["linrec, log_step", 16, 1024, "forward+backward"] == 2 * 5 * state_and_decay
    assert all(0 < r["efficiency"] < 1 for r in records if "efficiency" in r)
    output = capsys.readouterr().out
    assert "MiB received by each of 4 devices, forward:" in output
    assert "Projection" in output
    assert (tmp_path / "parallel.png").exists()


def test_ring_attention_is_attention():
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("seq",))
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 4), jnp.float32)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    actual = jax.jit(partial(CONTESTANTS["ring attention"], mesh))(q, k, v, v)
    assert jnp.allclose(actual, expected, atol=1e-5)
