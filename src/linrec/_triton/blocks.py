"""What the kernels share: where a chunk lies, its gates, and pairs of tokens under extreme gates.

A chunk is `BT` positions in order of time, those from its length on empty. Position `i` is the
token `first + SIGN * i`: reversed sequences differ in `SIGN` only.
"""

from typing import no_type_check

import triton
import triton.language as tl


# While the log-decays of a chunk sum up to less than this in every channel, factors e^A and e^-A
# are exact to rounding and far from overflow.
ORDINARY = tl.constexpr(40.0)
# Tokens of the pieces that other chunks are cut into.
PIECE = tl.constexpr(16)


@no_type_check
@triton.jit
def find_sequence(cu, i_slot, N, STEPS: tl.constexpr, BT: tl.constexpr):
    """The sequence that owns a slot. Slots of sequence `n` begin at `cu[n] // BT + n`.

    That leaves every sequence as many slots as it has chunks, without a sum over sequences.
    The tokens after the last sequence count as sequence `N`.
    """
    b_low = i_slot * 0
    b_high = b_low + N
    for _ in range(STEPS):
        b_middle = (b_low + b_high + 1) // 2
        m_before = tl.load(cu + b_middle) // BT + b_middle <= i_slot
        b_low = tl.where(m_before, b_middle, b_low)
        b_high = tl.where(m_before, b_high, b_middle - 1)
    return b_low


@no_type_check
@triton.jit
def load_scalar_gates(
    p_g, b_gamma, o_i, length, H: tl.constexpr, SIGN: tl.constexpr,
    USE_G: tl.constexpr, USE_GAMMA: tl.constexpr,
):  # fmt: skip
    """`g + g_gamma` at positions `o_i`; 0 from `length` on."""
    m_i = o_i < length
    b_g = tl.where(m_i, b_gamma, 0.0) if USE_GAMMA else tl.zeros(o_i.shape, tl.float32)
    if USE_G:
        b_g += tl.load(p_g + SIGN * o_i * H, mask=m_i, other=0.0).to(tl.float32)
    return b_g


@no_type_check
@triton.jit
def load_channel_gates(
    p_gates, p_g, b_gamma, o_i, length, o_c, H: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr,
    FOLD_G: tl.constexpr, FOLD_GAMMA: tl.constexpr,
):  # fmt: skip
    """Gates per channel, with the scalar gates added where these are to be folded in.

    0 where there is no channel or no token: the growth of nothing may not be infinite.
    """
    m = (o_i < length)[:, None] & (o_c < C)[None, :]
    p = p_gates + SIGN * o_i[:, None] * (H * C) + o_c[None, :]
    b_gates = tl.load(p, mask=m, other=0.0).to(tl.float32)
    if FOLD_G or FOLD_GAMMA:
        b_g = load_scalar_gates(p_g, b_gamma, o_i, length, H, SIGN, FOLD_G, FOLD_GAMMA)
        b_gates += b_g[:, None]
        if ((o_c.shape[0] - 1) & C) != 0:  # C is no multiple of a block, a power of two
            b_gates = tl.where((o_c < C)[None, :], b_gates, 0.0)
    return b_gates


@no_type_check
@triton.jit
def is_ordinary(b_gates):
    """Not so for NaN and infinities either."""
    return tl.max(tl.sum(tl.abs(b_gates), 0), 0) < ORDINARY


@no_type_check
@triton.jit
def sums_to_end(
    b_gates, b_sums, ordinary, p_gates, p_g, b_gamma, length, o_c, H: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, FOLD_G: tl.constexpr, FOLD_GAMMA: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """The sum of the gates after each token up to the end of the chunk, from their `cumsum`."""
    if ordinary:
        b_rest = tl.sum(b_gates, 0)[None, :] - b_sums
    else:
        # A difference would lose digits after a strong gate, and everything after -inf.
        b_next = load_channel_gates(
            p_gates, p_g, b_gamma, tl.arange(0, BT) + 1, tl.minimum(length, BT), o_c, H, C, SIGN,
            FOLD_G, FOLD_GAMMA,
        )  # fmt: skip
        b_rest = tl.cumsum(b_next, 0, reverse=True)
    return b_rest


@no_type_check
@triton.jit
def reach(b_gates, b_sums, BT: tl.constexpr):
    """Cumulative sums as seen from the middle of the chunk."""
    m_before = (tl.arange(0, BT) < BT // 2)[:, None]
    return b_sums - tl.sum(tl.where(m_before, b_gates, 0.0), 0)[None, :]


@no_type_check
@triton.jit
def sums_before(b, BT: tl.constexpr, BC: tl.constexpr):
    """Cumulative sums without the token itself. To subtract it would lose digits."""
    o_before = tl.broadcast_to(tl.maximum(tl.arange(0, BT) - 1, 0)[:, None], [BT, BC])
    b_sums = tl.gather(tl.cumsum(b, 0), o_before, 0)
    return tl.where((tl.arange(0, BT) > 0)[:, None], b_sums, 0.0)


# Pairs of tokens under any gates. A chunk is cut into pieces of `PIECE` tokens. Between pieces are
# matrix products, with decays counted from the boundary before the later token: none is above 1
# where gates are decays. Inside of pieces tokens `j` are taken one by one from the last, in all
# pieces at once. `b_decay` holds the decay between `j` and every later token of its piece, zero for
# those that are not later. It is a product of single decays, as in the recurrence itself.


@no_type_check
@triton.jit
def sums_to_end_of_piece(b, SIZE: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):
    b = tl.reshape(b, [BT // SIZE, SIZE, BC])
    return tl.reshape(tl.cumsum(b, 1, reverse=True), [BT, BC])


@no_type_check
@triton.jit
def decays_around(
    i_first, p_gates, p_g, b_gamma, length, o_c, H: tl.constexpr, C: tl.constexpr,
    SIGN: tl.constexpr, FOLD_G: tl.constexpr, FOLD_GAMMA: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Decays from all tokens before `i_first` to there, and from there to the tokens of the piece
    that begins there. Zero for other tokens.

    Gates are loaded anew: holding them takes registers from chunks that are ordinary.
    """
    o_i = tl.arange(0, BT)
    b_next = load_channel_gates(
        p_gates, p_g, b_gamma, o_i + 1, tl.minimum(length, i_first), o_c, H, C, SIGN, FOLD_G,
        FOLD_GAMMA,
    )  # fmt: skip
    b_before = tl.exp(tl.cumsum(b_next, 0, reverse=True))
    m_piece = (o_i >= i_first) & (o_i < i_first + PIECE)
    b_gates = load_channel_gates(
        p_gates, p_g, b_gamma, tl.where(m_piece, o_i, length), length, o_c, H, C, SIGN, FOLD_G,
        FOLD_GAMMA,
    )  # fmt: skip
    b_after = tl.exp(tl.cumsum(b_gates, 0))
    m_before = o_i < i_first
    return tl.where(m_before[:, None], b_before, 0.0), tl.where(m_piece[:, None], b_after, 0.0)


@no_type_check
@triton.jit
def add_scores(
    b_pairs, b_x, b_y, p_y, Y_STRIDE: tl.constexpr, p_gates, p_g, b_gamma, length, o_c,
    H: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr, FOLD_G: tl.constexpr,
    FOLD_GAMMA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, FACTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds `sum_c x_ic y_jc e^(sum of the gates of c after j up to i)` at `[i, j]`."""
    o_i = tl.arange(0, BT)
    for i_first in range(PIECE, tl.minimum(length, BT), PIECE):
        b_from, b_to = decays_around(
            i_first, p_gates, p_g, b_gamma, length, o_c, H, C, SIGN, FOLD_G, FOLD_GAMMA, BT
        )
        b_from, b_to = (b_y * b_from).to(FACTOR), (b_x * b_to).to(FACTOR)
        b_pairs = tl.dot(b_to, tl.trans(b_from), b_pairs, input_precision=PRECISION)

    b_decay = tl.zeros([BT, BC], tl.float32)
    for i in range(0, tl.minimum(length, PIECE)):
        o_j = o_i // PIECE * PIECE + tl.minimum(length, PIECE) - 1 - i
        m_j = (o_j < length)[:, None] & (o_c < C)[None, :]
        p_y_j = p_y + SIGN * o_j[:, None] * Y_STRIDE + o_c[None, :]
        b_y_j = tl.load(p_y_j, mask=m_j, other=0.0).to(tl.float32)
        b_pairs_j = tl.sum(b_x * b_decay * b_y_j, 1)
        b_pairs += tl.where(o_i[None, :] == o_j[:, None], b_pairs_j[:, None], 0.0)
        b_step = load_channel_gates(
            p_gates, p_g, b_gamma, o_j, length, o_c, H, C, SIGN, FOLD_G, FOLD_GAMMA
        )
        b_decay = tl.where((o_i == o_j)[:, None], 1.0, b_decay) * tl.exp(b_step)
    return b_pairs


@no_type_check
@triton.jit
def add_effects(
    b_row, b_col, b_share, b_pairs, b_r, b_w, b_scale, p_w, W_STRIDE: tl.constexpr, p_gates, p_g,
    b_gamma, length, o_c, H: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr,
    FOLD_G: tl.constexpr, FOLD_GAMMA: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    FACTOR: tl.constexpr, PRECISION: tl.constexpr, COL: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Adds the effects of the pairs to `row_i` and, `scale`-fold, to `col_j` and `share_i`.

    The share of a gate in its gradient is a sum over the pairs that it stands between. It is summed
    as such: the difference of cumulative sums that equals it has no correct digit where gates are
    strong. It takes a chunk that is one piece, since there are no registers left for products.
    """
    SIZE: tl.constexpr = BT if SHARE else PIECE
    o_i = tl.arange(0, BT)
    for i_first in range(SIZE, tl.minimum(length, BT), SIZE):
        b_from, b_to = decays_around(
            i_first, p_gates, p_g, b_gamma, length, o_c, H, C, SIGN, FOLD_G, FOLD_GAMMA, BT
        )
        b_in = (b_w * b_from).to(FACTOR)
        b_row += tl.dot(b_pairs.to(FACTOR), b_in, input_precision=PRECISION) * b_to
        if COL:
            b_out = (b_r * b_to).to(FACTOR)
            b_out = tl.dot(tl.trans(b_pairs.to(FACTOR)), b_out, input_precision=PRECISION)
            b_col += b_out * (b_from * b_scale)

    b_decay = tl.zeros([BT, BC], tl.float32)
    for i in range(0, tl.minimum(length, SIZE)):
        o_j = o_i // SIZE * SIZE + tl.minimum(length, SIZE) - 1 - i
        m_j = (o_j < length)[:, None] & (o_c < C)[None, :]
        p_w_j = p_w + SIGN * o_j[:, None] * W_STRIDE + o_c[None, :]
        b_w_j = tl.load(p_w_j, mask=m_j, other=0.0).to(tl.float32)
        b_pairs_j = tl.sum(tl.where(o_i[None, :] == o_j[:, None], b_pairs, 0.0), 1)
        b_effect = b_pairs_j[:, None] * b_decay
        b_row += b_effect * b_w_j
        if COL:
            b_crossing = sums_to_end_of_piece(b_effect * b_r, SIZE, BT, BC) * b_scale
            b_col += tl.where((o_i == o_j)[:, None], b_crossing, 0.0)
        if SHARE:
            b_share += tl.where((o_i > o_j)[:, None], b_crossing * b_w_j, 0.0)
        b_step = load_channel_gates(
            p_gates, p_g, b_gamma, o_j, length, o_c, H, C, SIGN, FOLD_G, FOLD_GAMMA
        )
        b_decay = tl.where((o_i == o_j)[:, None], 1.0, b_decay) * tl.exp(b_step)
    return b_row, b_col, b_share
