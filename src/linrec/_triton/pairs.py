"""Everything that happens inside a chunk: the effect of tokens on each other and on the states.

One kernel serves three launches, since output and gradients have one form. Let `c` be the channels
that are summed over and `o` those that remain, `P_ij = sum_c x_ic y_jc e^(gates between)` for
`i > j`, `h` and `dh` the state before the chunk and the gradient of the state after it. Then

    row_i = scale (sum_j P_ij w_j + x_i y_i w_i + x_i h)
    col_j = scale (sum_i P_ij r_i + x_j y_j r_j) + y_j dh

(every product with the gates in between) are, with `x y | r w` as given:

| launch     | `c` | `o` | `x y` | `r w` | `row`     | `col` |
| ---------- | --- | --- | ----- | ----- | --------- | ----- |
| forward 2  | K   | V   | q k   | - v   | o         | -     |
| backward 2 | V   | K   | do v  | q k   | dq        | dk    |
| backward 3 | K   | V   | q k   | do v  | o, unsaved | dv   |

The gradient of the gates of `o` follows from `r row - w col`, summed from the end of the chunk,
that of scalar gates likewise. What `col` has from `dh` is summed over the tokens before instead:
the total less what comes after is the same on paper, and has no digit left where gates are strong.

Row tensors have `H` heads, column tensors `H / GROUP`: a program that writes `col` does all the
query heads of its kv head.
"""

from typing import no_type_check

import triton
import triton.language as tl

from .blocks import (
    add_effects,
    add_scores,
    find_sequence,
    is_ordinary,
    load_channel_gates,
    load_scalar_gates,
    reach,
    sums_before,
    sums_to_end,
)


@no_type_check
@triton.jit
def pairs_kernel(
    x,
    y,
    r,
    w,
    gc,  # gates of the channels that are summed over
    go,  # gates of the channels that remain
    g,
    gamma,  # (B, N, H)
    scale,  # (B,)
    cu,  # (B, N + 1), if PACKED
    h,  # (B, SLOTS, H, K, V): states before each chunk
    dh,  # the same: gradients of the states after each chunk
    T,
    N,
    SLOTS,
    row,
    col,
    d_go,
    d_g,  # (blocks of o, B, T, H)
    d_gamma,  # (blocks of o, B, SLOTS, H)
    d_scale,  # (blocks of o, B, SLOTS, H)
    H: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,  # query heads that a program does
    C: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    O_IS_KEY: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BO: tl.constexpr,
    DOT: tl.constexpr,  # what tensor cores take: of arrays as they are
    FACTOR: tl.constexpr,  # and of factors that were computed
    PRECISION: tl.constexpr,
    STEPS: tl.constexpr,  # of the search for a slot's sequence
    USE_GC: tl.constexpr,
    USE_GO: tl.constexpr,
    USE_G: tl.constexpr,
    USE_GAMMA: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
    GRAD_GO: tl.constexpr,  # with gates `o`: their gradient
    GRAD_SCALAR: tl.constexpr,  # those of `g`, `gamma` and `scale`
):
    SIGN: tl.constexpr = -1 if REVERSE else 1
    # Scalar gates are part of the gates per key channel, where there are such. Else they act on
    # whole pairs.
    USE_GK: tl.constexpr = USE_GO if O_IS_KEY else USE_GC
    USE_SCALAR: tl.constexpr = (USE_G or USE_GAMMA) and not USE_GK
    FOLD_GC: tl.constexpr = USE_G and USE_GC and not O_IS_KEY
    FOLD_GAMMA_C: tl.constexpr = USE_GAMMA and USE_GC and not O_IS_KEY
    FOLD_GO: tl.constexpr = USE_G and USE_GO and O_IS_KEY
    FOLD_GAMMA_O: tl.constexpr = USE_GAMMA and USE_GO and O_IS_KEY
    # In a state of shape (K, V).
    STRIDE_C: tl.constexpr = 1 if O_IS_KEY else O
    STRIDE_O: tl.constexpr = C if O_IS_KEY else 1

    i_o = tl.program_id(1)
    i_ph = tl.program_id(0) % (H // HEADS)
    i_bs = tl.program_id(0) // (H // HEADS)
    i_b, i_slot = i_bs // SLOTS, i_bs % SLOTS
    o_i = tl.arange(0, BT)
    o_o = i_o * BO + tl.arange(0, BO)
    m_o = (o_o < O)[None, :]
    m_later = o_i[:, None] > o_i[None, :]

    i_n = i_b * 0
    b_begin, b_end = i_b * 0, i_b * 0 + T
    i_chunk = i_slot
    if PACKED:
        p_cu = cu + i_b * (N + 1)
        i_n = find_sequence(p_cu, i_slot, N, STEPS, BT)
        b_begin = tl.load(p_cu + i_n)
        b_end = tl.load(p_cu + i_n + 1, mask=i_n < N, other=T)
        i_chunk = i_slot - (b_begin // BT + i_n)
    length = b_end - b_begin - i_chunk * BT
    i_first = b_end - 1 - i_chunk * BT if REVERSE else b_begin + i_chunk * BT
    i_token0 = i_b.to(tl.int64) * T + i_first
    m_i = o_i < length
    m_tile = m_i[:, None] & m_o
    o_row = SIGN * o_i[:, None] * (H * O) + o_o[None, :]
    o_col = SIGN * o_i[:, None] * (H // GROUP * O) + o_o[None, :]
    i_kv = i_ph * HEADS // GROUP
    p_w = w + (i_token0 * (H // GROUP) + i_kv) * O
    b_slots = tl.num_programs(0) // (H // HEADS)
    i_sums = (i_o * b_slots + i_bs) * H + i_ph * HEADS
    p_d_g = d_g + i_o.to(tl.int64) * (b_slots // SLOTS) * T * H

    if PACKED:  # noqa: SIM102
        if (i_n == N) | (length <= 0):
            # Padding, or a slot to spare.
            b_zeros = tl.zeros([BT, BO], tl.float32)
            if COL:
                p_col = col + (i_token0 * (H // GROUP) + i_kv) * O + o_col
                tl.store(p_col, b_zeros.to(col.dtype.element_ty), mask=m_tile)
            for i_g in range(HEADS):
                i_h = i_ph * HEADS + i_g
                i_token = i_token0 * H + i_h
                if ROW:
                    p_row = row + i_token * O + o_row
                    tl.store(p_row, b_zeros.to(row.dtype.element_ty), mask=m_tile)
                if GRAD_GO:
                    p_d_go = d_go + i_token * O + o_row
                    tl.store(p_d_go, b_zeros.to(d_go.dtype.element_ty), mask=m_tile)
                if GRAD_SCALAR:
                    tl.store(d_scale + i_sums + i_g, 0.0)
                    if USE_G:
                        b_none = tl.zeros([BT], tl.float32)
                        tl.store(p_d_g + i_token + SIGN * o_i * H, b_none, mask=m_i)
                    if USE_GAMMA:
                        tl.store(d_gamma + i_sums + i_g, 0.0)
            return

    b_scale = tl.load(scale + i_b).to(tl.float32)
    b_col_all = tl.zeros([BT, BO], tl.float32)

    for i_g in range(HEADS):
        i_h = i_ph * HEADS + i_g
        i_token = i_token0 * H + i_h
        i_state = (i_bs.to(tl.int64) * H + i_h) * (C * O)
        p_g = g + i_token
        b_gamma = tl.load(gamma + (i_b * N + i_n) * H + i_h).to(tl.float32) if USE_GAMMA else 0.0

        # 1. Sums over the channels `c`.
        b_pairs = tl.zeros([BT, BT], tl.float32)
        b_self = tl.zeros([BT], tl.float32)  # x_i y_i, in which no gate takes part
        b_row = tl.zeros([BT, BO], tl.float32)  # from the state before the chunk
        b_col = tl.zeros([BT, BO], tl.float32)  # from the gradient of the state after it
        b_whole = tl.zeros([BO], tl.float32)  # h dh, over the whole chunk
        for i_c in range(0, C, BC):
            o_c = i_c + tl.arange(0, BC)
            m_c = m_i[:, None] & (o_c < C)[None, :]
            p_x = x + i_token * C + SIGN * o_i[:, None] * (H * C) + o_c[None, :]
            p_y = y + (i_token0 * (H // GROUP) + i_kv) * C
            b_x = tl.load(p_x, mask=m_c, other=0.0)
            o_y = SIGN * o_i[:, None] * (H // GROUP * C) + o_c[None, :]
            b_y = tl.load(p_y + o_y, mask=m_c, other=0.0)
            b_self += tl.sum(b_x.to(tl.float32) * b_y.to(tl.float32), 1)
            if USE_GC:
                p_gc = gc + i_token * C
                b_gc = load_channel_gates(
                    p_gc, p_g, b_gamma, o_i, length, o_c, H, C, SIGN, FOLD_GC, FOLD_GAMMA_C
                )
                b_sums = tl.cumsum(b_gc, 0)
                b_x, b_y = b_x.to(tl.float32), b_y.to(tl.float32)
                ordinary = is_ordinary(b_gc)
                if ordinary:
                    b_reach = reach(b_gc, b_sums, BT)
                    b_to = (b_x * tl.exp(b_reach)).to(FACTOR)
                    b_from = (b_y * tl.exp(-b_reach)).to(FACTOR)
                    b_pairs = tl.dot(b_to, tl.trans(b_from), b_pairs, input_precision=PRECISION)
                else:
                    b_pairs = add_scores(
                        b_pairs, b_x, b_y, p_y, H // GROUP * C, p_gc, p_g, b_gamma, length, o_c, H,
                        C, SIGN, FOLD_GC, FOLD_GAMMA_C, BT, BC, FACTOR, PRECISION,
                    )  # fmt: skip
            else:
                b_from = tl.trans(b_y.to(DOT))
                b_pairs = tl.dot(b_x.to(DOT), b_from, b_pairs, input_precision=PRECISION)
            o_state = o_c[:, None] * STRIDE_C + o_o[None, :] * STRIDE_O
            m_state = (o_c < C)[:, None] & m_o
            if ROW or GRAD_GO:
                b_h = tl.load(h + i_state + o_state, mask=m_state, other=0.0)
                if USE_GC:
                    b_x = (b_x * tl.exp(b_sums)).to(FACTOR)
                    b_row = tl.dot(b_x, b_h.to(FACTOR), b_row, input_precision=PRECISION)
                else:
                    b_row = tl.dot(b_x.to(DOT), b_h.to(DOT), b_row, input_precision=PRECISION)
            if COL:
                b_dh = tl.load(dh + i_state + o_state, mask=m_state, other=0.0)
                if USE_GC:
                    b_rest = sums_to_end(
                        b_gc, b_sums, ordinary, p_gc, p_g, b_gamma, length, o_c, H, C, SIGN,
                        FOLD_GC, FOLD_GAMMA_C, BT,
                    )  # fmt: skip
                    b_y = (b_y * tl.exp(b_rest)).to(FACTOR)
                    b_col = tl.dot(b_y, b_dh.to(FACTOR), b_col, input_precision=PRECISION)
                else:
                    b_col = tl.dot(b_y.to(DOT), b_dh.to(DOT), b_col, input_precision=PRECISION)
            if GRAD_GO or (GRAD_SCALAR and USE_SCALAR):
                b_h_dh = b_h.to(tl.float32) * b_dh.to(tl.float32)
                if USE_GC:
                    b_h_dh *= tl.exp(tl.sum(b_gc, 0))[:, None]
                b_whole += tl.sum(b_h_dh, 0)

        # 2. Scalar gates: one decay for each pair of tokens, from sums of the gates between them.
        if USE_SCALAR:
            b_g = load_scalar_gates(p_g, b_gamma, o_i, length, H, SIGN, USE_G, USE_GAMMA)
            b_pairs *= tl.exp(tl.cumsum(tl.where(m_later, b_g[:, None], 0.0), 0))
            b_row *= tl.exp(tl.cumsum(b_g, 0))[:, None]
            if COL:
                b_next = load_scalar_gates(
                    p_g, b_gamma, o_i + 1, tl.minimum(length, BT), H, SIGN, USE_G, USE_GAMMA
                )
                b_col *= tl.exp(tl.cumsum(b_next, 0, reverse=True))[:, None]
            b_whole *= tl.exp(tl.sum(b_g, 0))
        b_pairs = tl.where(m_later, b_pairs, 0.0)

        # 3. The channels `o`: the effects of the pairs, then those of every token on itself.
        b_w = tl.load(p_w + o_col, mask=m_tile, other=0.0)
        if COL:
            b_r = tl.load(r + i_token * O + o_row, mask=m_tile, other=0.0)
        if GRAD_SCALAR and USE_SCALAR:
            b_d_g = tl.cumsum(tl.sum(b_r.to(tl.float32) * b_row, 1) * b_scale, 0, reverse=True)
            b_past = tl.sum(b_w.to(tl.float32) * b_col, 1)
        if USE_GO:
            p_go = go + i_token * O
            b_go = load_channel_gates(
                p_go, p_g, b_gamma, o_i, length, o_o, H, O, SIGN, FOLD_GO, FOLD_GAMMA_O
            )
            b_sums = tl.cumsum(b_go, 0)
            ordinary = is_ordinary(b_go)
            b_row *= tl.exp(b_sums)
            if COL:
                b_rest = sums_to_end(
                    b_go, b_sums, ordinary, p_go, p_g, b_gamma, length, o_o, H, O, SIGN,
                    FOLD_GO, FOLD_GAMMA_O, BT,
                )  # fmt: skip
                b_col *= tl.exp(b_rest)
            b_d_go = b_row  # of use with GRAD_GO only
            if GRAD_GO:
                b_whole *= tl.exp(tl.sum(b_go, 0))
            if ordinary:
                b_reach = reach(b_go, b_sums, BT)
                b_from = (b_w.to(tl.float32) * tl.exp(-b_reach)).to(FACTOR)
                b_in = tl.dot(b_pairs.to(FACTOR), b_from, input_precision=PRECISION)
                b_row += b_in * tl.exp(b_reach)
                if COL:
                    b_from = (b_r.to(tl.float32) * tl.exp(b_reach)).to(FACTOR)
                    b_in = tl.dot(tl.trans(b_pairs.to(FACTOR)), b_from, input_precision=PRECISION)
                    b_in *= tl.exp(-b_reach) * b_scale
                    if GRAD_GO:
                        b_d_go = b_scale * b_r.to(tl.float32) * b_row - b_w.to(tl.float32) * b_in
                        b_d_go = tl.cumsum(b_d_go, 0, reverse=True)
                        b_d_go += sums_before(b_w.to(tl.float32) * b_col, BT, BO)
                    b_col += b_in
            else:
                if GRAD_GO:
                    b_d_go = tl.cumsum(b_r.to(tl.float32) * b_row, 0, reverse=True) * b_scale
                    b_d_go += sums_before(b_w.to(tl.float32) * b_col, BT, BO)
                b_row, b_col, b_d_go = add_effects(
                    b_row, b_col, b_d_go, b_pairs, (b_r if COL else b_w).to(tl.float32),
                    b_w.to(tl.float32), b_scale, p_w, H // GROUP * O, p_go, p_g, b_gamma, length,
                    o_o, H, O, SIGN, FOLD_GO, FOLD_GAMMA_O, BT, BO, FACTOR, PRECISION, COL, GRAD_GO,
                )  # fmt: skip
            if GRAD_GO:
                b_d_go += b_whole[None, :]
                p_d_go = d_go + i_token * O + o_row
                tl.store(p_d_go, b_d_go.to(d_go.dtype.element_ty), mask=m_tile)
            if GRAD_SCALAR and (USE_G or USE_GAMMA):
                b_d_g = tl.sum(b_d_go, 1)
        else:
            if ROW:
                b_row = tl.dot(b_pairs.to(DOT), b_w.to(DOT), b_row, input_precision=PRECISION)
            if COL:
                b_pairs_t = tl.trans(b_pairs.to(DOT))
                b_col += tl.dot(b_pairs_t, b_r.to(DOT), input_precision=PRECISION) * b_scale
        if ROW:
            b_row += b_self[:, None] * b_w.to(tl.float32)
            p_row = row + i_token * O + o_row
            tl.store(p_row, (b_row * b_scale).to(row.dtype.element_ty), mask=m_tile)
        if GRAD_SCALAR:
            tl.store(d_scale + i_sums + i_g, tl.sum(b_row * b_r.to(tl.float32)))
        if COL:
            b_col_all += b_col + (b_self * b_scale)[:, None] * b_r.to(tl.float32)
            if i_g == HEADS - 1:
                p_col = col + (i_token0 * (H // GROUP) + i_kv) * O + o_col
                tl.store(p_col, b_col_all.to(col.dtype.element_ty), mask=m_tile)

        # 4. The gradient of scalar gates.
        if GRAD_SCALAR and USE_SCALAR:
            # A gate's share is that of the pairs it stands between, and of the states.
            b_rw = tl.dot(b_r.to(DOT), tl.trans(b_w.to(DOT)), input_precision=PRECISION)
            b_crossing = tl.cumsum(b_pairs * b_rw, 0, reverse=True) * b_scale + b_past[None, :]
            b_d_g += tl.sum(tl.where(m_later, b_crossing, 0.0), 1) + tl.sum(b_whole, 0)
        if GRAD_SCALAR and USE_G:
            tl.store(p_d_g + i_token + SIGN * o_i * H, b_d_g, mask=m_i)
        if GRAD_SCALAR and USE_GAMMA:
            tl.store(d_gamma + i_sums + i_g, tl.sum(tl.where(m_i, b_d_g, 0.0)))
