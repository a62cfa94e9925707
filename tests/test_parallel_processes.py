"""Several processes on this machine, through `jax.distributed`."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest


HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def run_together(programs: list[list[str]]) -> list[str]:
    """Starts all of them, and gives what they wrote."""
    started = [
        subprocess.Popen(
            [sys.executable, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for program in programs
    ]
    try:
        written = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, written, strict=True):
        assert process.returncode == 0, output
    return written


@pytest.mark.parametrize("processes", [2, 4])
def test_like_one_device(processes):
    worker, port = str(HERE / "parallel_worker.py"), str(free_port())
    run_together([[worker, str(i), str(processes), port] for i in range(processes)])


def test_example():
    """It prints the loss of all devices together, and of one alone."""
    program = str(HERE.parent / "examples" / "train_parallel.py")
    small = ["--steps", "2", "--length", "32", "--batch", "2", "--size", "16"]
    place = ["--devices", "4", "--seq-shards", "2", "--processes", "2"]
    address = ["--coordinator", f"localhost:{free_port()}"]
    programs = [[program, *small, *place, *address, "--process", str(i)] for i in range(2)]
    first, _ = run_together(programs)
    loss = {
        who: float(line.split()[-1])
        for line in first.splitlines()
        for who in ("4 devices together", "one device alone")
        if who in line
    }
    assert abs(loss["4 devices together"] / loss["one device alone"] - 1) < 1e-5
