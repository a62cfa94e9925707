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

from .helpers import relative_error, TOLERANCE


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
def test_launches_of_the_lowered_forward_pass():
    assert launches(text_for_cuda(partial(loss, METHOD), given("g"))) == 2


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
    arguments = given("g", "g_gamma", "gk", "gv")

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
    call.jax_triton.cache_clear()
    jax.clear_caches()  # other tests may have traced the same call
    x = jnp.ones((4, 1, 2), jnp.float32)
    with pytest.raises(ImportError, match=r"linrec\[cuda12\]"):
        linrec.recurrent(x, x, x, method=METHOD)
    call.jax_triton.cache_clear()


def test_kernels_are_imported_when_they_run():
    program = """
import sys, jax.numpy as jnp, linrec
x = jnp.ones((4, 1, 2))
linrec.recurrent(x, x, x, method=linrec.Chunked())
repr(linrec.Triton())
assert not {"triton", "jax_triton"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("K", [64, 128])
def test_two_programs_to_a_processor(K):
    """What `test_benchmark.py` asks of gates per channel: blocks are cut down to small heads."""
    from linrec._triton.call import record_calls
    from linrec.benchmark._compiled import compile_call, TARGETS

    x = jax.ShapeDtypeStruct((1, 128, 2, K), jnp.bfloat16)
    g = jax.ShapeDtypeStruct((1, 128, 2), jnp.float32)
    f = lambda x, g: linrec.recurrent(x, x, x, g, method=METHOD)[0].astype(jnp.float32)
    with record_calls() as calls:
        jax.eval_shape(jax.grad(lambda *x: jnp.sum(f(*x)), (0, 1)), x, g)
    for call in calls:
        if call.name in ("output", "d_value"):
            resources = compile_call(call, TARGETS["sm_80"])
            assert resources.spilled_bytes == 0
            assert resources.blocks_per_sm >= 2


def test_addresses_beyond_32_bits():
    """The last row of arrays of 2^31 elements, through all kernels. Memory that is not touched
    costs nothing."""
    from linrec._triton.call import record_calls
    from linrec._triton.interpret import run

    B, T, K = 2**21 + 1, 64, 16
    shapes = {
        "query": (B, T, 1, K), "key": (B, T, 1, K), "value": (B, T, 1, K), "g": (B, T, 1),
        "gk": (B, T, 1, K), "gv": (B, T, 1, K), "initial_state": (B, 1, K, K),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    given = {name: np.zeros(x, np.float16) for name, x in shapes.items() if name[0] != "i"}
    given["initial_state"] = np.zeros(shapes["initial_state"], np.float32)
    for name, x in given.items():
        x[-1] = -rng.uniform(0, 0.1, x.shape[1:]) if "g" in name else rng.normal(size=x.shape[1:])
    d_o, d_state = given["query"], given["initial_state"]  # numbers like any other

    def everything(method, arguments, cotangents):
        run = lambda x: linrec.recurrent(**x, softmax_scale=1.0, method=method)
        out, pull_back = jax.vjp(run, arguments)
        return *out, pull_back(cotangents)[0]

    with record_calls() as record:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
        cotangents = (abstract["query"], abstract["initial_state"])
        method = linrec.Triton(interpret=True)
        jax.eval_shape(partial(everything, method), abstract, cotangents)
    calls = {call.name: call for call in record}

    def last_program(name, *inputs):
        call = calls[name]
        inputs = [d_o if x is None else x for x in inputs]
        sizes, outputs = call.arguments[len(inputs) :][:3], call.arguments[len(inputs) + 3 :]
        results = [np.zeros(x.shape, x.dtype) for x in outputs]
        program = tuple(n - 1 for n in (*call.grid, 1)[:3])
        run(call.kernel, [*inputs, *sizes, *results], call.grid, call.constants, [program])
        return results

    q, k, v, g, gk, gv, state = given.values()
    rest = (g, None, np.ones(B, np.float32), None)
    states, final = last_program("walk", k, v, gk, gv, *rest, state)
    o, *_ = last_program("output", q, k, None, v, gk, gv, *rest, states, None)
    d_states, d_initial = last_program("backward_walk", q, d_o, gk, gv, *rest, d_state)
    d_q, d_k, d_gk, d_g, *_ = last_program("d_key", d_o, v, q, k, gv, gk, *rest, states, d_states)
    _, d_v, d_gv, *_ = last_program("d_value", q, k, d_o, v, gk, gv, *rest, states, d_states)

    row = {name: jnp.asarray(x[-1:], jnp.float64) for name, x in given.items()}
    expected = everything(linrec.Scan(), row, (row["query"], row["initial_state"]))
    gradients = [expected[2][name] for name in given]
    actual = (o, final, d_q, d_k, d_v, d_g[0], d_gk, d_gv, d_initial)
    for a, e in zip(actual, (*expected[:2], *gradients), strict=True):
        assert relative_error(a[-1].reshape(e.shape), e) < TOLERANCE["float16"]
