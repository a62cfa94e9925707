"""A contestant on a case, compiled: what can be timed, weighed and checked."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array


# Arguments of `linrec.recurrent`: arrays, or what stands for them in another framework.
Inputs = dict[str, Any]


class Program(NamedTuple):
    """`call` runs to the end and returns the output, and the gradients if it is to."""

    call: Callable[[], dict[str, Any]]
    compile_seconds: float | None
    temp_bytes: int | None


def compile_jax(run: Callable[[Inputs], Array], inputs: Inputs, cotangent: Array | None) -> Program:
    """`run` forward, or also backward if there is a `cotangent`, as one XLA program.

    Arrays may be `jax.ShapeDtypeStruct`s where the program is not to be called.
    """
    program = _forward(run) if cotangent is None else _forward_and_backward(run)
    arguments = (inputs,) if cotangent is None else (inputs, cotangent)
    start = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else memory.temp_size_in_bytes
    return Program(lambda: jax.block_until_ready(compiled(*arguments)), seconds, temp_bytes)


def _forward(run):
    return lambda inputs: {"output": run(inputs)}


def _forward_and_backward(run):
    def program(inputs, cotangent):
        output, pull_back = jax.vjp(run, inputs)
        (gradients,) = pull_back(cotangent)
        return {"output": output} | {f"gradient of {name}": x for name, x in gradients.items()}

    return program
