"""The same kernels on a CPU, in Triton's interpreter: what the tests run, and what counts work."""

import contextlib
import dataclasses
import functools
import itertools
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from jaxtyping import Array
from triton import knobs
from triton.runtime import interpreter


_TYPES = {
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "int32": tl.int32,
}
# The interpreter's state is global.
_lock = threading.RLock()
_counts: list["Work"] = []
_tables: list[dict[str, "Work"]] = []


@dataclasses.dataclass
class Work:
    """What kernels did, counted while they ran."""

    launches: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    flops: int = 0
    """Of matrix products."""


@contextlib.contextmanager
def count_work() -> Iterator[dict[str, Work]]:
    """Counts the work of the kernels that are interpreted meanwhile, by the names of launches."""
    table = {}
    _tables.append(table)
    try:
        yield table
    finally:
        _tables.remove(table)


def call_interpreter(
    name: str,
    kernel: Any,
    inputs: Sequence[Array],
    sizes: Sequence[int],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    aliases: dict[int, int] | None,
    constants: dict[str, Any],
) -> list[Array]:
    """As `call`, with a callback in the place of the kernel."""

    def on_host(*given: Any) -> list[np.ndarray]:
        inputs = [np.ascontiguousarray(x) for x in given]
        # Whatever a kernel forgets to write shows.
        results = [np.full(x.shape, np.nan, x.dtype) for x in outputs]
        for i, o in (aliases or {}).items():
            inputs[i] = results[o] = np.array(inputs[i])
        with _counting(name):
            run(kernel, [*inputs, *sizes, *results], grid, constants)
        return results

    return jax.pure_callback(on_host, list(outputs), *inputs)


@contextlib.contextmanager
def _counting(name: str) -> Iterator[None]:
    with _lock:
        _counts[:] = [table.setdefault(name, Work()) for table in _tables]
        for work in _counts:
            work.launches += 1
        try:
            yield
        finally:
            _counts.clear()


def run(
    kernel: Any,
    arguments: Sequence[np.ndarray | int],
    grid: tuple[int, ...],
    constants: dict[str, Any],
    programs: Sequence[tuple[int, ...]] | None = None,
) -> None:
    """Runs a kernel on numpy arrays, in place: all programs of the grid, or those given."""
    grid = grid + (1,) * (3 - len(grid))
    with _interpreting() as builder, np.errstate(all="ignore"):
        function = _rewritten(kernel.fn)
        wrapped = [interpreter._implicit_cvt(_pointer(x)) for x in arguments]
        builder.set_grid_dim(*grid)
        for program in programs or itertools.product(*map(range, grid)):
            builder.set_grid_idx(*program)
            function(*wrapped, **constants)


def _pointer(x: np.ndarray | int) -> Any:
    if isinstance(x, int):
        return x
    address = interpreter.TensorHandle(np.array([x.ctypes.data], np.uint64), tl.uint64)
    type_ = tl.pointer_type(_TYPES[x.dtype.name])
    return tl.tensor(dataclasses.replace(address, dtype=type_), type_)


@functools.cache
def _rewritten(function: Any) -> Any:
    return interpreter.FunctionRewriter(function).rewrite_ast()


@contextlib.contextmanager
def _interpreting() -> Iterator[interpreter.InterpreterBuilder]:
    """Inside, Triton's language computes with numpy.

    Triton itself decides between compiling and interpreting when a function is decorated, which
    for its own library is when it is imported. Here functions are interpreted that were decorated
    to be compiled, so that one process can do both.
    """
    builder = interpreter.interpreter_builder
    modules = {"tl": tl, "core": tl.core}
    with _lock:
        scope = interpreter._patch_lang(types.SimpleNamespace(__globals__=modules))
        scope.set_attr(triton.JITFunction, "__call__", _call_device_function)
        scope.set_attr(knobs.runtime, "interpret", True)
        for name, replacement in _replacements(builder).items():
            scope.set_attr(builder, name, replacement)
        try:
            yield builder
        finally:
            scope.restore()


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _rewritten(self.fn)(*args, **kwargs)


def _replacements(builder: interpreter.InterpreterBuilder) -> dict[str, Any]:
    """Parts of the interpreter that count, or that are wrong in bfloat16.

    Its blocks of bfloat16 hold raw bits, which it truncates to and multiplies as integers.
    """
    load, store = builder.create_masked_load, builder.create_masked_store
    cast, dot = builder.cast_impl, builder.create_dot

    def counted_load(ptrs, mask, *args):
        result = load(ptrs, mask, *args)
        for work in _counts:
            work.bytes_read += int(np.count_nonzero(mask.data)) * result.data.itemsize
        return result

    def counted_store(ptrs, value, mask, *args):
        for work in _counts:
            work.bytes_written += int(np.count_nonzero(mask.data)) * value.data.itemsize
        return store(ptrs, value, mask, *args)

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = np.ascontiguousarray(x.data).view(ml_dtypes.bfloat16).astype(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def cast_right(src, dst_type):
        if dst_type.scalar != tl.bfloat16 or src.dtype.scalar == tl.bfloat16:
            return cast(widen(src), dst_type)
        data = src.data.astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(data, tl.bfloat16)

    def counted_dot(a, b, d, *args):
        for work in _counts:
            work.flops += 2 * a.data.size * b.data.shape[-1]
        return dot(widen(a), widen(b), d, *args)

    return {
        "create_masked_load": counted_load,
        "create_masked_store": counted_store,
        "cast_impl": cast_right,
        "create_dot": counted_dot,
    }
