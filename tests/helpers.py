"""One list of methods, one table of tolerances, one way to compare."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import linrec


# A new method is tested by adding it here.
METHODS = {
    "scan": linrec.Scan(),
    "chunked-16": linrec.Chunked(16),
    "segmented": linrec.Segmented(24, linrec.Chunked(16)),
    "auto": linrec.Auto(),  # `Chunked()` on a CPU
    # The kernels themselves, in an interpreter that takes its time by the token.
    "triton": linrec.Triton(linrec.KernelConfig(chunk=16), interpret=True),
}

GATES = {
    "none": (),
    "g": ("g",),
    "g-per-key": ("g_per_key",),
    "g_gamma": ("g_gamma",),
    "gk": ("gk",),
    "gv": ("gv",),
    "gk-and-g_gamma": ("gk", "g_gamma"),
    "all": ("g", "g_gamma", "gk", "gv"),
}

# Of the relative root mean square error against the float64 reference.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}

# Packed sequences: empty ones at the start, in between and at the end, one of a single token.
PACKING = (0, 0, 33, 34, 34, 90, 90)


class Case(NamedTuple):
    """A problem. Hashable, so that the reference is computed once for all methods."""

    gates: str = "none"
    B: int = 2
    T: int = 100
    H: int = 4
    Hkv: int = 2
    K: int = 6
    V: int = 5
    dtype: str = "float32"
    strength: str = "ordinary"
    with_state: bool = True
    reverse: bool = False
    packing: tuple[int, ...] | None = None
    batched: bool = True
    seed: int = 0

    def arguments(self) -> dict:
        """Of `linrec.recurrent`: everything that has a gradient."""
        B, T, H, Hkv, K, V = self[1:7]
        B = 1 if self.packing else B
        rng = np.random.default_rng(self.seed)
        normal = lambda *shape: rng.standard_normal(shape)
        rows = B if self.packing is None else len(self.packing) - 1
        out = {
            "query": normal(B, T, H, K),
            "key": normal(B, T, Hkv, K),
            "value": normal(B, T, Hkv, V),
            "softmax_scale": np.array(0.3),
        }
        shapes = {
            "g": (B, T, H),
            "g_per_key": (B, T, H, K),
            "g_gamma": (rows, H),
            "gk": (B, T, H, K),
            "gv": (B, T, H, V),
        }
        for gate in GATES[self.gates]:
            out["g" if gate == "g_per_key" else gate] = _gate(self.strength, rng, shapes[gate])
        if self.with_state:
            out["initial_state"] = normal(rows, H, K, V)
        if not self.batched:
            drop = ("query", "key", "value", "g", "gk", "gv")
            drop = drop if self.packing else (*drop, "g_gamma", "initial_state")
            out = {name: x[0] if name in drop else x for name, x in out.items()}
        wide = ("g", "g_gamma", "gk", "gv", "initial_state", "softmax_scale")
        half = self.dtype in ("bfloat16", "float16")
        return {
            name: jnp.asarray(x, "float32" if half and name in wide else self.dtype)
            for name, x in out.items()
        }

    def options(self) -> dict:
        cu_seqlens = None if self.packing is None else jnp.array(self.packing)
        return {"reverse": self.reverse, "cu_seqlens": cu_seqlens}


def _gate(strength: str, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    weak = -np.logaddexp(0, -rng.standard_normal(shape)) / 16
    match strength:
        case "ordinary":
            return weak
        case "strong":  # as of gates without a normaliser: past what a chunk can factorise
            return 16 * weak
        case "-3" | "-6" | "-10" | "-20" | "-200" | "0.5":
            return np.full(shape, float(strength)) * rng.uniform(0.9, 1.1, shape)
        case "-inf":
            return np.where(rng.uniform(size=shape) < 0.1, -np.inf, weak)
        case "-1e4":
            return np.where(rng.uniform(size=shape) < 0.1, -1e4, weak)
        case "zero":
            return np.zeros(shape)
        case "growth":
            return np.full(shape, 0.5) / 4
    raise ValueError(strength)


@contextlib.contextmanager
def count_compilations():
    """A list with one entry for each program that is compiled meanwhile."""
    compilations = []

    def listener(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield compilations
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def evaluate(arguments: dict, options: dict, method) -> dict:
    """Output, final state and the gradient of every argument, from random cotangents of both."""
    return _program(method, options["reverse"])(arguments, options["cu_seqlens"])


@functools.cache
def _program(method, reverse: bool):
    """Kept, so that problems of the same shapes are compiled once."""

    @jax.jit
    def everything(arguments, cu_seqlens):
        def run(arguments):
            return linrec.recurrent(
                **arguments, cu_seqlens=cu_seqlens, reverse=reverse, method=method
            )

        out, pull_back = jax.vjp(run, arguments)
        (gradients,) = pull_back(_cotangents(out))
        return {"output": out[0], "final_state": out[1]} | {
            f"gradient of {name}": x for name, x in gradients.items()
        }

    return everything


def _cotangents(out):
    """Of both outputs. Every dtype holds these numbers, so that all get the same problem."""
    rng = np.random.default_rng(1)
    draw = lambda shape: np.round(8 * rng.standard_normal(shape)) / 8
    return tuple(jnp.zeros_like(x) + jnp.asarray(draw(x.shape), x.dtype) for x in out)


@functools.cache
def reference(case: Case) -> dict:
    arguments = {name: x.astype(jnp.float64) for name, x in case.arguments().items()}
    return evaluate(arguments, case.options(), linrec.Scan())


def relative_error(actual: jax.Array, expected: jax.Array, least: float = 0.0) -> float:
    """Root mean square, relative. What float32 cannot hold counts as zero on both sides.

    Errors of what is expected to be smaller than `least` are relative to that.
    """
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    rms = lambda x: float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0
    return rms(actual - expected) / max(rms(expected), least, 1e-30)


def assert_close(actual: dict, expected: dict, dtype: str, least: dict[str, float]) -> None:
    """Prints the largest error, for `pytest -rP`."""
    assert actual.keys() == expected.keys()
    errors = {}
    for name in expected:
        assert actual[name].shape == expected[name].shape, name
        assert bool(jnp.all(jnp.isfinite(actual[name]))), name
        errors[name] = relative_error(actual[name], expected[name], least.get(name, 0.0))
    worst = max(errors, key=errors.__getitem__)
    print(f"error {errors[worst]:.1e} of {worst}, {dtype}")
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE[dtype]}
    assert not wrong, wrong


def check(case: Case, method, place=lambda arguments: arguments) -> dict:
    """Everything `method` gives for `case` against the float64 scan."""
    print(case)
    arguments = place(case.arguments())
    actual = evaluate(arguments, case.options(), method)
    state_dtype = "float64" if case.dtype == "float64" else "float32"
    assert actual["output"].dtype == case.dtype
    assert actual["final_state"].dtype == state_dtype
    for name, x in arguments.items():
        assert actual[f"gradient of {name}"].dtype == x.dtype, name
    expected = reference(case)
    assert_close(actual, expected, case.dtype, _least(case, expected))
    return actual


def compare(arguments: dict, method) -> None:
    """Checks arguments that no case stands for."""
    options = {"reverse": False, "cu_seqlens": None}
    wide = {name: x.astype(jnp.float64) for name, x in arguments.items()}
    expected = evaluate(wide, options, linrec.Scan())
    assert_close(evaluate(arguments, options, method), expected, "float32", least={})


def _least(case: Case, expected: dict) -> dict[str, float]:
    """What sums over many terms count as at least: as much as terms of any sign sum up to.

    The gradients of the scale and of a fixed gate are a few numbers. Where the terms of one happen
    to cancel, the float32 scan misses it too.
    """
    arguments = case.arguments()
    outputs = (expected["output"], expected["final_state"])
    terms = outputs[0] * _cotangents(outputs)[0] / arguments["softmax_scale"].astype(jnp.float64)
    least = {"gradient of softmax_scale": float(jnp.linalg.norm(terms))}
    if "g_gamma" in arguments:
        sums = expected["gradient of g_gamma"].size
        terms = _gradient_by_token(case)
        least["gradient of g_gamma"] = float(jnp.linalg.norm(terms)) / sums**0.5
    return least


@functools.cache
def _gradient_by_token(case: Case) -> jax.Array:
    """Of the log-decay of whole states, of which that of a fixed gate is the sum over tokens."""
    arguments = {name: x.astype(jnp.float64) for name, x in case.arguments().items()}
    if "g" not in arguments:
        arguments["g"] = jnp.zeros(arguments["query"].shape[:-1])
    return evaluate(arguments, case.options(), linrec.Scan())["gradient of g"]
