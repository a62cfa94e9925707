"""A few tokens: one launch that reads and writes the state once, in place."""

from typing import no_type_check

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array

from .._inputs import Inputs
from .call import call
from .config import fit, KernelConfig, Launch, MAX_DECODE_KEY


@no_type_check
@triton.jit
def decode_kernel(
    q,
    k,
    v,
    gk,
    gv,
    g,
    gamma,  # (B, 1, H)
    scale,  # (B,)
    state,  # (B, 1, H, K, V)
    T,
    o,
    state_out,  # the memory of `state`
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_GV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GAMMA: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The recurrence as it is defined, on a tile of all key and some value channels."""
    i_row, i_v = tl.program_id(0), tl.program_id(1)
    i_b, i_h = i_row // H, i_row % H
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    o_state = i_row.to(tl.int64) * (K * V) + o_k[:, None] * V + o_v[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    b_h = tl.load(state + o_state, mask=m_state, other=0.0)
    b_scale = tl.load(scale + i_b)
    b_gamma = tl.load(gamma + i_row) if USE_GAMMA else 0.0

    for i in range(0, T):
        i_token = i_b.to(tl.int64) * T + (T - 1 - i if REVERSE else i)
        i_kv = i_token * (H // GROUP) + i_h // GROUP
        i_token = i_token * H + i_h
        b_q = tl.load(q + i_token * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(k + i_kv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_v = tl.load(v + i_kv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        # Gates add up before `exp`: their sum may be harmless where one of them is not.
        if USE_G or USE_GAMMA or USE_GK:
            b_a = tl.zeros([BK], tl.float32) + b_gamma
            if USE_G:
                b_a += tl.load(g + i_token).to(tl.float32)
            if USE_GK:
                b_a += tl.load(gk + i_token * K + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_h *= tl.exp(b_a)[:, None]
        if USE_GV:
            b_c = tl.load(gv + i_token * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            b_h *= tl.exp(b_c)[None, :]
        b_h += b_k[:, None] * b_v[None, :]
        b_o = tl.sum(b_q[:, None] * b_h, 0) * b_scale
        tl.store(o + i_token * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)

    tl.store(state_out + o_state, b_h, mask=m_state)


def decode(launch: Launch, rows: Inputs) -> tuple[Array, Array]:
    """The output and the final state of sequences of a few tokens, one to a row."""
    B, T, H, K = rows.q.shape
    V = rows.v.shape[-1]
    config = launch.config or KernelConfig()
    BK = fit(MAX_DECODE_KEY, K)
    # At most 8192 numbers of the state for each program.
    BV = fit(max(16, min(config.decode_value, 8192 // BK)), V)
    struct = jax.ShapeDtypeStruct
    output, final_state = call(
        "decode",
        decode_kernel,
        (
            rows.q, rows.k, rows.v, rows.gk, rows.gv, rows.g, rows.g_gamma, rows.scale,
            rows.initial_state,
        ),
        (T,),
        (
            struct(rows.output_shape, rows.v.dtype),
            struct(rows.initial_state.shape, jnp.float32),
        ),
        grid=(B * H, -(-V // BV)),
        **launch.target(warps=4, stages=1),
        aliases={8: 1},
        H=H,
        GROUP=H // rows.k.shape[2],
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        USE_GK=rows.gk is not None,
        USE_GV=rows.gv is not None,
        USE_G=rows.g is not None,
        USE_GAMMA=rows.g_gamma is not None,
        REVERSE=rows.reverse,
    )  # fmt: skip
    return output, final_state
