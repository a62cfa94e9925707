"""The walk over the chunks of a sequence that leaves the state before each of them."""

from typing import no_type_check

import triton
import triton.language as tl

from .blocks import is_ordinary, load_channel_gates, load_scalar_gates, sums_to_end


@no_type_check
@triton.jit
def walk_kernel(
    x,  # forward: k (B, T, H / GROUP, K); backward: q (B, T, H, K), with GROUP 1
    y,  # forward: v (B, T, H / GROUP, V); backward: do (B, T, H, V)
    gk,
    gv,
    g,
    gamma,  # (B, N, H)
    scale,  # (B,)
    cu,  # (B, N + 1), if PACKED
    start,  # (B, N, H, K, V)
    T,
    N,
    SLOTS,
    states,  # (B, SLOTS, H, K, V): before each chunk, in the direction of the walk
    end,  # (B, N, H, K, V)
    H: tl.constexpr,
    GROUP: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,  # what tensor cores take: of arrays as they are
    FACTOR: tl.constexpr,  # and of factors that were computed
    PRECISION: tl.constexpr,
    USE_GK: tl.constexpr,
    USE_GV: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GAMMA: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Forward, chunk by chunk, `h <- e^A h e^D + sum_j (k_j e^(A - A_j)) (v_j e^(D - D_j))^T`.

    Backward, from the last chunk on, `dh <- e^A dh e^D + sum_i (scale q_i e^A_i) (do_i e^D_i)^T`.
    """
    i_row, i_k, i_v = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_h = i_row % H
    i_bn = i_row // H
    i_b = i_bn // N
    SIGN: tl.constexpr = -1 if REVERSE else 1
    FOLD_G: tl.constexpr = USE_GK and USE_G
    FOLD_GAMMA: tl.constexpr = USE_GK and USE_GAMMA
    USE_SCALAR: tl.constexpr = (USE_G or USE_GAMMA) and not USE_GK

    b_begin, b_end = i_b * 0, i_b * 0 + T
    i_slot = i_b * 0
    if PACKED:
        i_n = i_bn % N
        b_begin = tl.load(cu + i_bn + i_b)
        b_end = tl.load(cu + i_bn + i_b + 1)
        i_slot = b_begin // BT + i_n
    b_total = b_end - b_begin
    b_chunks = tl.cdiv(b_total, BT)

    o_i = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    o_state = o_k[:, None] * V + o_v[None, :]
    m_state = m_k[:, None] & m_v[None, :]
    i_state = i_row.to(tl.int64) * (K * V)
    b_h = tl.load(start + i_state + o_state, mask=m_state, other=0.0).to(tl.float32)
    b_gamma = tl.load(gamma + i_row).to(tl.float32) if USE_GAMMA else 0.0
    b_scale = tl.load(scale + i_b).to(tl.float32) if BACKWARD else 1.0

    for i in range(0, b_chunks):
        i_chunk = b_chunks - 1 - i if BACKWARD else b_chunks * 0 + i
        i_slot_here = (i_b * SLOTS + i_slot + i_chunk).to(tl.int64)
        p_states = states + (i_slot_here * H + i_h) * (K * V)
        tl.store(p_states + o_state, b_h.to(states.dtype.element_ty), mask=m_state)

        length = b_total - i_chunk * BT
        i_first = b_end - 1 - i_chunk * BT if REVERSE else b_begin + i_chunk * BT
        i_token = (i_b.to(tl.int64) * T + i_first) * H + i_h
        i_token_xy = (i_b.to(tl.int64) * T + i_first) * (H // GROUP) + i_h // GROUP
        m_i = (o_i < length)[:, None]
        p_x = x + i_token_xy * K + SIGN * o_i[:, None] * (H // GROUP * K) + o_k[None, :]
        p_y = y + i_token_xy * V + SIGN * o_i[:, None] * (H // GROUP * V) + o_v[None, :]
        b_x = tl.load(p_x, mask=m_i & m_k[None, :], other=0.0)
        b_y = tl.load(p_y, mask=m_i & m_v[None, :], other=0.0)
        p_g = g + i_token

        if USE_GK:
            p_gk = gk + i_token * K
            b_gk = load_channel_gates(
                p_gk, p_g, b_gamma, o_i, length, o_k, H, K, SIGN, FOLD_G, FOLD_GAMMA
            )
            b_sums = tl.cumsum(b_gk, 0)
            if not BACKWARD:
                b_sums = sums_to_end(
                    b_gk, b_sums, is_ordinary(b_gk), p_gk, p_g, b_gamma, length, o_k, H, K, SIGN,
                    FOLD_G, FOLD_GAMMA, BT,
                )  # fmt: skip
            b_x = b_x.to(tl.float32) * tl.exp(b_sums)
            b_h *= tl.exp(tl.sum(b_gk, 0))[:, None]
        if USE_GV:
            p_gv = gv + i_token * V
            b_gv = load_channel_gates(
                p_gv, p_g, b_gamma, o_i, length, o_v, H, V, SIGN, False, False
            )
            b_sums = tl.cumsum(b_gv, 0)
            if not BACKWARD:
                b_sums = sums_to_end(
                    b_gv, b_sums, is_ordinary(b_gv), p_gv, p_g, b_gamma, length, o_v, H, V, SIGN,
                    False, False, BT,
                )  # fmt: skip
            b_y = b_y.to(tl.float32) * tl.exp(b_sums)
            b_h *= tl.exp(tl.sum(b_gv, 0))[None, :]
        if USE_SCALAR:
            b_g = load_scalar_gates(p_g, b_gamma, o_i, length, H, SIGN, USE_G, USE_GAMMA)
            if BACKWARD:
                b_sums = tl.cumsum(b_g, 0)
            else:
                b_next = load_scalar_gates(
                    p_g, b_gamma, o_i + 1, tl.minimum(length, BT), H, SIGN, USE_G, USE_GAMMA
                )
                b_sums = tl.cumsum(b_next, 0, reverse=True)
            b_x = b_x.to(tl.float32) * tl.exp(b_sums)[:, None]
            b_h *= tl.exp(tl.sum(b_g, 0))
        if BACKWARD:
            b_x = b_x.to(tl.float32) * b_scale
        OPERAND: tl.constexpr = FACTOR if USE_GK or USE_GV or USE_SCALAR or BACKWARD else DOT
        b_h = tl.dot(tl.trans(b_x.to(OPERAND)), b_y.to(OPERAND), b_h, input_precision=PRECISION)

    tl.store(end + i_state + o_state, b_h, mask=m_state)
