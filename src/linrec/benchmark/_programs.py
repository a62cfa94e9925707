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


def compile_jax(run: Callable[[Inputs], Array], inputs: Inputs, cotangent: Any) -> Program:
    """`run` forward, or also backward if `cotangent` is not `None`, as one XLA program.

    Arrays may be `jax.ShapeDtypeStruct`s where the program is not to be called.
    """
    program, arguments = _program(run, inputs, cotangent)
    start = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    temp_bytes = None if memory is None else memory.temp_size_in_bytes
    return Program(lambda: jax.block_until_ready(compiled(*arguments)), seconds, temp_bytes)


def run_eagerly(run: Callable[[Inputs], Array], inputs: Inputs, cotangent: Any) -> Program:
    """As `compile_jax`, operation by operation, for what cannot be traced."""
    program, arguments = _program(run, inputs, cotangent)
    return Program(lambda: jax.block_until_ready(program(*arguments)), None, None)


def _program(run, inputs, cotangent):
    if cotangent is None:
        return lambda inputs: {"output": run(inputs)}, (inputs,)

    def forward_and_backward(inputs, cotangent):
        output, pull_back = jax.vjp(run, inputs)
        (gradients,) = pull_back(cotangent)
        return {"output": output} | {f"gradient of {name}": x for name, x in gradients.items()}

    return forward_and_backward, (inputs, cotangent)
