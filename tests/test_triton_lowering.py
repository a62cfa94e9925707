"""What programs for a GPU hold, seen from a machine without one."""

import re
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linrec


B, T, H, K = 2, 96, 4, 16
METHOD = linrec.Triton(compute_capability=90)


def given(*gates, dtype=jnp.bfloat16):
    shapes = {
        "query": (B, T, H, K), "key": (B, T, H // 2, K), "value": (B, T, H // 2, K),
        "g": (B, T, H), "gk": (B, T, H, K), "gv": (B, T, H, K), "g_gamma": (H,),
    }  # fmt: skip
    names = ("query", "key", "value", *gates)
    return {n: jax.ShapeDtypeStruct(shapes[n], jnp.float32 if n in gates else dtype) for n in names}


def loss(method, arguments):
    o, state = linrec.recurrent(**arguments, method=method)
    return jnp.sum(o.astype(jnp.float32)) + jnp.sum(state)


def text_for_cuda(function, *arguments):
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def launches(text):
    return text.count("@triton_kernel_call")


@pytest.mark.parametrize("gates", [(), ("g",), ("g_gamma",), ("gk",), ("gv",), ("g", "gk", "gv")])
def test_two_launches_forward_and_three_backward(gates):
    traced = lambda f: str(jax.make_jaxpr(f)(given(*gates)))
    assert traced(partial(loss, METHOD)).count("triton_kernel_call[") == 2
    assert traced(jax.grad(partial(loss, METHOD))).count("triton_kernel_call[") == 5


@pytest.mark.core
def test_launches_of_the_lowered_program():
    assert launches(text_for_cuda(partial(loss, METHOD), given("g"))) == 2
    assert launches(text_for_cuda(jax.grad(partial(loss, METHOD)), given("g"))) == 5


@pytest.mark.core
def test_auto_is_triton_for_cuda():
    text = text_for_cuda(jax.grad(partial(loss, linrec.Auto())), given("g"))
    assert launches(text) == 5
    assert "dot_general" not in text


@pytest.mark.core
def test_auto_is_chunked_for_cpu():
    text = jax.jit(jax.grad(partial(loss, linrec.Auto()))).lower(given("g")).as_text()
    assert launches(text) == 0
    assert "dot_general" in text


@pytest.mark.parametrize("method", [METHOD, linrec.Auto()])
def test_vmap_is_one_launch(method):
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), given("g"))
    assert launches(text_for_cuda(jax.vmap(jax.grad(partial(loss, method))), rows)) == 5


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("method", [METHOD, linrec.Auto()])
def test_shard_map(method, check_vma):
    P = jax.sharding.PartitionSpec
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    f = lambda x: jax.lax.psum(loss(method, x), "x")
    specs = (dict.fromkeys(given("g"), P("x")),)
    f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    assert launches(text_for_cuda(jax.grad(f), given("g"))) == 5


def test_no_passes_over_channels():
    """Whatever XLA does beside the kernels has no axis of channels and tokens."""
    arguments = given("g", "g_gamma")

    def everything(arguments, cotangents):
        out, pull_back = jax.vjp(lambda x: linrec.recurrent(**x, method=METHOD), arguments)
        return out, pull_back(cotangents)

    out = jax.eval_shape(lambda x: linrec.recurrent(**x, method=METHOD), arguments)
    text = text_for_cuda(everything, arguments, out)
    assert launches(text) == 5
    operations = [line for line in text.splitlines() if "stablehlo." in line]
    beside = [line for line in operations if "@triton_kernel_call" not in line]
    assert not [line for line in beside if re.search(rf"tensor<{B}x{T}x\d+x{K}x", line)]


def test_decoding_is_one_launch_in_place():
    arguments = {
        name: jax.ShapeDtypeStruct((B, 1, *x.shape[2:]), x.dtype) for name, x in given("gk").items()
    } | {"initial_state": jax.ShapeDtypeStruct((B, H, K, K), jnp.float32)}
    text = text_for_cuda(lambda x: linrec.recurrent(**x, method=METHOD), arguments)
    assert launches(text) == 1
    assert "output_operand_alias" in text


def test_step_is_one_launch():
    one = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    state = jax.ShapeDtypeStruct((H, K, K), jnp.float32)
    token = (one(H, K), one(H // 2, K), one(H // 2, K))
    assert launches(text_for_cuda(linrec.step, state, *token)) == 1
    text = jax.jit(linrec.step).lower(state, *token).as_text()
    assert launches(text) == 0


def test_export_for_cuda():
    safe = jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call")
    f = jax.jit(jax.value_and_grad(partial(loss, linrec.Auto())))
    exported = jax.export.export(f, platforms=["cuda"], disabled_checks=[safe])(given("g"))
    assert exported.platforms == ("cuda",)
    assert launches(exported.mlir_module()) == 5


@pytest.mark.core
def test_on_a_cpu_it_says_what_to_do():
    x = jnp.ones((4, 1, 2), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"linrec\.Auto"):
        jax.jit(lambda x: linrec.recurrent(x, x, x, method=METHOD)).lower(x)


@pytest.mark.core
def test_without_jax_triton_it_says_what_to_install(monkeypatch):
    from linrec._triton import call

    monkeypatch.setitem(sys.modules, "jax_triton", None)
    call._jax_triton.cache_clear()
    x = jnp.ones((4, 1, 2), jnp.float32)
    with pytest.raises(ImportError, match=r"linrec\[cuda12\]"):
        linrec.recurrent(x, x, x, method=METHOD)
    call._jax_triton.cache_clear()


def test_kernels_are_imported_when_they_run():
    program = """
import sys, jax.numpy as jnp, linrec
x = jnp.ones((4, 1, 2))
linrec.recurrent(x, x, x, method=linrec.Chunked())
repr(linrec.Triton())
assert not {"triton", "jax_triton"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_addresses_beyond_32_bits():
    """The last tokens of rows of 2^31 elements. Memory that is not touched costs nothing."""
    from linrec._triton.call import record_calls
    from linrec._triton.interpret import run

    T, K, length = 2**27, 16, 8
    method = linrec.Triton(interpret=True)
    x = jax.ShapeDtypeStruct((2, T, 1, K), jnp.float16)

    def two_rows(x, cu_seqlens):
        one = lambda x, c: linrec.recurrent(x, x, x, cu_seqlens=c, method=method)
        return jax.vmap(one)(x[:, None], cu_seqlens)

    with record_calls() as calls:
        jax.eval_shape(two_rows, x, jax.ShapeDtypeStruct((2, 3), jnp.int32))
    walk, output = calls[-2:]  # those of both rows at once
    tokens = np.zeros(x.shape, np.float16)
    tokens[1, -length:] = np.random.default_rng(0).standard_normal((length, 1, K))
    boundaries = np.array([[0, T - length, T]] * 2, np.int32)
    slot = (T - length) // 64 + 1

    def memory(call):
        def of(argument):
            if isinstance(argument, int):
                return argument
            match argument.shape:
                case (2, t, 1, _) if t == T:
                    return tokens
                case (2, 3):
                    return boundaries
                case (2,):
                    return np.ones(2, np.float32)
                case shape:
                    return np.zeros(shape, argument.dtype)

        return [of(argument) for argument in call.arguments]

    arguments = memory(walk)
    run(walk.kernel, arguments, walk.grid, walk.constants, programs=[(3, 0, 0)])
    last = tokens[1, -length:, 0].astype(np.float32)
    np.testing.assert_allclose(arguments[-1][1, 1, 0], last.T @ last, rtol=1e-5)

    arguments = memory(output)
    slots = output.grid[0] // 2
    written = arguments[-6] = np.zeros(x.shape, np.float16)
    run(output.kernel, arguments, output.grid, output.constants, programs=[(slots + slot, 0, 0)])
    expected = np.tril(last @ last.T) @ last
    np.testing.assert_allclose(written[1, -length:, 0], expected, rtol=2e-3)
