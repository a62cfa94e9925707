"""What is imported, and how much memory programs take."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import linrec


def test_import_is_light():
    program = """
import sys, jax, equinox
before = set(sys.modules)
import linrec
new = {name.split(".")[0] for name in set(sys.modules) - before}
heavy = new & {"triton", "jax_triton", "torch", "matplotlib", "rich", "optax", "beartype"}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def temporaries(T: int, gates: bool, **options) -> int:
    """Bytes that forward and backward need beside their inputs and outputs."""
    x = jax.ShapeDtypeStruct((1, T, 2, 32), jnp.float32)

    def gradients(q, k, v, gk, d_output):
        def output(q, k, v, gk):
            return linrec.recurrent(q, k, v, gk=gk if gates else None, **options)[0]

        return jax.vjp(output, q, k, v, gk)[1](d_output)

    compiled = jax.jit(gradients).lower(x, x, x, x, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


STATE = 2 * 32 * 32 * 4


@pytest.mark.parametrize("gates", [False, True])
def test_states_of_chunks_are_all_that_is_kept(gates):
    growth = temporaries(8192, gates) - temporaries(4096, gates)
    assert growth <= 1.05 * (4096 // 64) * STATE


@pytest.mark.parametrize("gates", [False, True])
def test_chunk_size_bounds_memory(gates):
    """Beyond the output and its gradient, one state per piece."""
    growth = temporaries(16384, gates, chunk_size=512) - temporaries(8192, gates, chunk_size=512)
    output = 8192 * 2 * 32 * 4
    assert growth <= 2 * output + 1.05 * (8192 // 512) * STATE
