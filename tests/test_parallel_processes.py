"""Several processes on this machine, through `jax.distributed`."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest


HERE = Path(__file__).parent


def run_together(processes: int, program: Path, *arguments: str) -> list[str]:
    """Starts `program PROCESS PROCESSES PORT *arguments` that often; what they wrote."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    started = [
        subprocess.Popen(
            [sys.executable, str(program), str(process), str(processes), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
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
    run_together(processes, HERE / "parallel_worker.py")
