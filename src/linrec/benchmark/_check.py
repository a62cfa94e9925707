"""Who is right. A wrong answer is never timed or weighed as if it were right."""

import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import linrec

from ._cases import Case
from ._contestants import Contestant
from ._programs import compile_jax, Inputs, Program


# Relative RMS error of the output and of every gradient. A few times what linrec's tests allow:
# enough to tell a wrong answer from one with less digits.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}


class Verdict(NamedTuple):
    """A contestant on a case. `problem` says why there is nothing to time."""

    program: Program | None
    error: float | None
    problem: str | None


class Problem(NamedTuple):
    """A case with its inputs and right answers."""

    case: Case
    inputs: Inputs
    cotangent: Array
    answers: dict[str, np.ndarray]

    @staticmethod
    def of(case: Case) -> "Problem":
        """The answers are those of `linrec.Scan` in float64, in pieces that fit into memory."""
        inputs, cotangent = case.inputs(), case.cotangent()
        method = linrec.Segmented(256, linrec.Scan())
        with jax.enable_x64(True):
            wide = lambda x: jnp.asarray(x, jnp.float64)
            program = compile_jax(
                lambda inputs: linrec.recurrent(**inputs, method=method)[0],
                {name: wide(x) for name, x in inputs.items()},
                wide(cotangent),
            )
            answers = {name: np.asarray(x) for name, x in program.call().items()}
        return Problem(case, inputs, cotangent, answers)

    def judge(self, contestant: Contestant, which: str, memory_limit: float) -> Verdict:
        """Builds a contestant's program, runs it once, and looks at what comes out."""
        problem = contestant.unsupported(self.case)
        if problem is not None:
            return Verdict(None, None, problem)
        cotangent = self.cotangent if which == "forward+backward" else None
        try:
            program = contestant.build(contestant.run, self.inputs, cotangent)
            if program.temp_bytes is not None and program.temp_bytes > memory_limit:
                return Verdict(None, None, f"needs {program.temp_bytes / 2**30:.1f} GiB")
            results = program.call()
        except Exception as error:  # whatever a contestant raises is how it fared
            message = textwrap.shorten(str(error), 80, placeholder="...")
            return Verdict(None, None, f"fails: {type(error).__name__}: {message}")
        if not contestant.same_maths:
            return Verdict(program, None, None)
        errors = {name: self._error(name, x) for name, x in results.items()}
        worst = max(errors, key=errors.__getitem__)
        if errors[worst] > TOLERANCE[self.case.dtype]:
            return Verdict(None, errors[worst], f"wrong: {worst} off by {errors[worst]:.1e}")
        return Verdict(program, errors[worst], None)

    def _error(self, name: str, result: Any) -> float:
        expected, result = self.answers[name], np.asarray(result, np.float64)
        if result.shape != expected.shape or not np.isfinite(result).all():
            return np.inf
        return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
