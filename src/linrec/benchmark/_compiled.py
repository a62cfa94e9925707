"""Kernels compiled for a GPU that is not there, and what the compilers say about them."""

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from .._triton.call import Call


class Target(NamedTuple):
    """A GPU: what the compiler takes it for, and what one of its processors has."""

    name: str
    backend: str
    arch: int | str
    warp: int
    shared_bytes: int
    shared_bytes_per_block: int
    warps: int


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 164 * 1024, 163 * 1024, 64),
        Target("sm_90", "cuda", 90, 32, 228 * 1024, 227 * 1024, 64),
        Target("sm_100", "cuda", 100, 32, 228 * 1024, 227 * 1024, 64),
        Target("gfx942", "hip", "gfx942", 64, 64 * 1024, 64 * 1024, 32),
    )
}
_REGISTERS = 65536
_SHARED_OVERHEAD = 1024  # per block, taken by the system
_POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int32": "*i32"}


class Resources(NamedTuple):
    """Of a compiled kernel."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    blocks_per_sm: int
    tensor_core_instructions: int
    seconds: float
    """Of one core, that compiling took. On a busy machine it takes more of them."""
    ptxas_seconds: float
    """Of these, in the assembler, which is a program of its own."""


def compile_call(call: Call, target: Target) -> Resources:
    """As jax_triton does it: arrays aligned to 16 bytes, integers that are 1 built in."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(call.constants)
    signature = {}
    for name, argument in zip(call.kernel.arg_names, call.arguments, strict=False):
        if isinstance(argument, int):
            signature[name] = "i32"
            if argument == 1:
                constants[name] = 1
        else:
            signature[name] = _POINTERS[argument.dtype.name]
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, type_ in enumerate(signature.values())
        if type_.startswith("*")
    }
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(call.kernel, signature=signature, constexprs=constants, attrs=attributes)
    begin = os.times()
    # A cache that is empty: what was compiled before would take no time.
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope():
        knobs.cache.dir = cache
        kernel = triton.compile(
            source,
            target=GPUTarget(target.backend, target.arch, target.warp),
            options={
                "num_warps": call.warps,
                "num_stages": call.stages,
                "enable_fp_fusion": True,
            },
        )
    user, system, ptxas_user, ptxas_system, _ = (
        after - before for before, after in zip(begin, os.times(), strict=True)
    )
    ptxas = ptxas_user + ptxas_system
    seconds = (user + system + ptxas, ptxas)
    shared = kernel.metadata.shared
    assert shared <= target.shared_bytes_per_block, f"{call.name} does not fit {target.name}"
    if target.backend == "hip":
        text = kernel.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s*(\d+)", text)
        spilled = 4 * _number(r"\.vgpr_spill_count:\s*(\d+)", text)
        matrix = len(re.findall(r"\bv_mfma", text))
        # Four units, each with 512 registers of one warp's width, share the memory.
        warps = 4 * min(512 // (-(-registers // 8) * 8), target.warps // 4)
        blocks = min(warps // call.warps, target.shared_bytes // max(shared, 1))
        return Resources(registers, spilled, shared, blocks, matrix, *seconds)
    registers, spilled = _usage(kernel.asm["cubin"])
    rounded = -(-registers // 8) * 8 * 32 * call.warps
    blocks = min(
        _REGISTERS // rounded,
        target.shared_bytes // (shared + _SHARED_OVERHEAD),
        target.warps // call.warps,
    )
    sass = _tool("nvdisasm", kernel.asm["cubin"])
    matrix = len(re.findall(r"\b(?:HMMA|HGMMA|UTC\w*MMA)", sass))
    return Resources(registers, spilled, shared, blocks, matrix, *seconds)


def _usage(cubin: bytes) -> tuple[int, int]:
    text = _tool("cuobjdump", cubin, "-res-usage")
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return int(match[1])


def _tool(name: str, cubin: bytes, *options: str) -> str:
    import triton

    path = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
