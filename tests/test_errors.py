"""Every mistake has an error in the caller's words."""

import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import linrec


pytestmark = [pytest.mark.core, pytest.mark.usefixtures("no_type_checks")]

Q = jnp.ones((2, 10, 4, 8), jnp.float32)
KV = jnp.ones((2, 10, 2, 8), jnp.float32)
PACKED = jnp.array([0, 4, 10])

MISTAKES = {
    "query of rank 2": (
        {"query": Q[0, 0]},
        "`linrec.recurrent(..., query=...)` expects 4 axes (batch, seq, heads, key), or 3",
    ),
    "key of another rank": ({"key": KV[0]}, "key=...)` expects the axes of `query` before its"),
    "value of another length": ({"value": KV[:, :9]}, "value=...)` expects the axes of `query`"),
    "heads that do not divide": (
        {"key": Q[:, :, :3], "value": Q[:, :, :3]},
        "has 3 heads, which do not divide the 4 heads of `query`",
    ),
    "key of other channels": (
        {"key": KV[..., :5]},
        "key=...)` expects shape (2, 10, 2, 8)",
    ),
    "key of other heads": ({"key": Q}, "key=...)` expects shape (2, 10, 2, 8)"),
    "g of the wrong heads": (
        {"g": jnp.ones((2, 10, 2))},
        "g=...)` expects shape (2, 10, 4) or (2, 10, 4, 8), one gate per head or per key channel, "
        "but has shape (2, 10, 2)",
    ),
    "g of the wrong rank": ({"g": jnp.ones((2, 10))}, "g=...)` expects shape (2, 10, 4) or"),
    "g_gamma": ({"g_gamma": jnp.ones((3,))}, "g_gamma=...)` expects shape (4,) or (2, 4)"),
    "gk": ({"gk": KV}, "gk=...)` expects shape (2, 10, 4, 8), one gate per key channel"),
    "gk beside g": ({"g": Q, "gk": KV}, "gk=...)` expects shape (2, 10, 4, 8)"),
    "gv": ({"gv": Q[..., :3]}, "gv=...)` expects shape (2, 10, 4, 8), one gate per value channel"),
    "integer query": (
        {"query": Q.astype(jnp.int32)},
        "query=...)` expects a floating-point array, but has dtype int32",
    ),
    "integer gate": ({"g": jnp.ones((2, 10, 4), jnp.int32)}, "g=...)` expects a floating-point"),
    "scale of several numbers": (
        {"softmax_scale": jnp.ones((4,))},
        "softmax_scale=...)` expects shape (), a number",
    ),
    "scale in words": ({"softmax_scale": "one"}, "softmax_scale=...)` expects an array, but got"),
    "initial_state": (
        {"initial_state": jnp.ones((2, 4, 8, 7))},
        "initial_state=...)` expects shape (2, 4, 8, 8), one state per row",
    ),
    "cu_seqlens with a batch": (
        {"cu_seqlens": PACKED},
        "cu_seqlens=...)` expects one packed sequence axis, but `query` has shape (2, 10, 4, 8). "
        "Concatenate the sequences along `seq` (batch 1), or drop `cu_seqlens`.",
    ),
    "float cu_seqlens": (
        {"query": Q[0], "key": KV[0], "value": KV[0], "cu_seqlens": jnp.ones((3,))},
        "cu_seqlens=...)` expects integers",
    ),
    "cu_seqlens of one boundary": (
        {"query": Q[0], "key": KV[0], "value": KV[0], "cu_seqlens": jnp.array([0])},
        "cu_seqlens=...)` expects the boundaries of N sequences",
    ),
    "number of initial states": (
        {
            "query": Q[0],
            "key": KV[0],
            "value": KV[0],
            "cu_seqlens": PACKED,
            "initial_state": jnp.ones((3, 4, 8, 8)),
        },
        "initial_state=...)` expects shape (2, 4, 8, 8), one state per sequence, but has shape",
    ),
    "chunk_size": (
        {"chunk_size": 0},
        "recurrent(..., chunk_size=...)` expects 1 or more, but got 0",
    ),
    "float chunk_size": ({"chunk_size": 2.5}, "chunk_size=...)` expects an integer, but got 2.5"),
    "bool chunk_size": ({"chunk_size": True}, "chunk_size=...)` expects an integer, but got True"),
    "unknown method": (
        {"method": "triton"},
        "method=...)` expects a method, an instance of `linrec.AbstractMethod`",
    ),
    "class as method": ({"method": linrec.Chunked}, "Did you mean `linrec.Chunked()`?"),
    "no query": ({"query": None}, "query=...)` expects an array, but got None"),
    "reverse": ({"reverse": "no"}, "reverse=...)` expects True or False, but got 'no'"),
}


def _parallel(method):
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,))
    return linrec.SequenceParallel(method, mesh, "seq")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    wrong, message = MISTAKES[mistake]
    arguments = {"query": Q, "key": KV, "value": KV} | wrong
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        linrec.recurrent(**arguments)
    static = {name: x for name, x in wrong.items() if not eqx.is_array(x)}
    traced = {name: x for name, x in arguments.items() if name not in static}
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        jax.jit(lambda x: linrec.recurrent(**x, **static))(traced)


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 7, 5, 10], "must not decrease"),
        ([1, 5, 7, 10], "has to start at 0"),
        ([0, 5, 7, 11], "passes the end of the sequence axis, which has 10 tokens"),
    ],
)
@pytest.mark.parametrize("jit", [True, False])
def test_values_of_cu_seqlens(boundaries, message, jit):
    f = lambda cu_seqlens: linrec.recurrent(Q[0], KV[0], KV[0], cu_seqlens=cu_seqlens)
    with pytest.raises(Exception, match=f"cu_seqlens=...\\)` {message}"):
        (eqx.filter_jit(f) if jit else f)(jnp.array(boundaries))


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (0, "1 or more"),
        (48, "a power of two"),
        (2.0, "an integer"),
        ("64", "an integer"),
        (np.array(64.0), "an integer"),
    ],
)
def test_block(block, expected):
    with pytest.raises(ValueError, match=rf"linrec.Chunked\(block=...\)` expects {expected}"):
        linrec.Chunked(block)


@pytest.mark.parametrize("wrap", [partial(linrec.Segmented, 4), _parallel])
def test_inner_method(wrap):
    with pytest.raises(ValueError, match=re.escape("Did you mean `linrec.Chunked()`?")):
        wrap(linrec.Chunked)


@pytest.mark.parametrize(
    ("layer", "layers", "message"),
    [(3, 3, "a layer counted from 0"), (-1, 4, "0 or more"), (0.5, 4, "an integer")],
)
def test_lightning_layer(layer, layers, message):
    with pytest.raises(ValueError, match=f"expects {message}"):
        linrec.lightning_attn(Q, KV, KV, layer, layers)


def test_step():
    with pytest.raises(ValueError, match=re.escape("`linrec.step(..., state=...)` expects an")):
        linrec.step(None, Q[0, 0], KV[0, 0], KV[0, 0])
    with pytest.raises(ValueError, match=re.escape("`linrec.step(..., query=...)` expects one")):
        linrec.step(jnp.ones((4, 8, 8)), Q, KV, KV)
    message = "gk=...)` expects shape (4, 8), one gate per key channel, but has shape (2, 8)"
    with pytest.raises(ValueError, match=re.escape(message)):
        linrec.step(jnp.ones((4, 8, 8)), Q[0, 0], KV[0, 0], KV[0, 0], gk=KV[0, 0])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (linrec.recurrent, "linrec.recurrent"),
        (linrec.recurrent_gla, "linrec.recurrent_gla"),
        (partial(linrec.lightning_attn, layer_idx=0, num_layers=2), "linrec.lightning_attn"),
    ],
)
@pytest.mark.parametrize(
    ("argument", "wrong"), [("chunk_size", 0), ("method", "scan"), ("initial_state", Q)]
)
def test_errors_name_what_was_called(call, name, argument, wrong):
    with pytest.raises(ValueError, match=re.escape(f"`{name}(..., {argument}=...)`")):
        call(Q, KV, KV, **{argument: wrong})


def test_segmented():
    with pytest.raises(ValueError, match=re.escape("`linrec.Segmented(chunk_size)` expects 1 or")):
        linrec.Segmented(0)
