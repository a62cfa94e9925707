"""What the kernels share: where a chunk lies, its gates, and pairs of tokens under extreme gates.

A chunk is `BT` positions in order of time, those from its length on empty. Position `i` is the
token `first + SIGN * i`: reversed sequences differ in `SIGN` only.
"""

import triton
import triton.language as tl


# While the log-decays of a chunk sum up to less than this in every channel, factors e^A and e^-A
# are exact to rounding and far from overflow.
ORDINARY = tl.constexpr(40.0)


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


@triton.jit
def load_channel_gates(
    p_gates, p_g, b_gamma, o_i, length, o_c, H: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr,
    FOLD_G: tl.constexpr, FOLD_GAMMA: tl.constexpr,
):  # fmt: skip
    """Gates per channel, with the scalar gates added where these are to be folded in."""
    m = (o_i < length)[:, None] & (o_c < C)[None, :]
    p = p_gates + SIGN * o_i[:, None] * (H * C) + o_c[None, :]
    b_gates = tl.load(p, mask=m, other=0.0).to(tl.float32)
    if FOLD_G or FOLD_GAMMA:
        b_gates += load_scalar_gates(p_g, b_gamma, o_i, length, H, SIGN, FOLD_G, FOLD_GAMMA)[:, None]
    return b_gates


@triton.jit
def is_ordinary(b_gates):
    """Not so for NaN and infinities either."""
    return tl.max(tl.sum(tl.abs(b_gates), 0), 0) < ORDINARY


@triton.jit
def sums_to_end(
    b_gates, p_gates, p_g, b_gamma, length, o_c, H: tl.constexpr, C: tl.constexpr,
    SIGN: tl.constexpr, FOLD_G: tl.constexpr, FOLD_GAMMA: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The sum of the gates after each token, up to the end of the chunk."""
    if is_ordinary(b_gates):
        b_sums = tl.cumsum(b_gates, 0, reverse=True) - b_gates
    else:
        # A difference would lose digits after a strong gate, and everything after -inf.
        o_next = tl.arange(0, BT) + 1
        b_next = load_channel_gates(
            p_gates, p_g, b_gamma, o_next, tl.minimum(length, BT), o_c, H, C, SIGN,
            FOLD_G, FOLD_GAMMA,
        )  # fmt: skip
        b_sums = tl.cumsum(b_next, 0, reverse=True)
    return b_sums


@triton.jit
def reach(b_gates, BT: tl.constexpr):
    """Cumulative sums as seen from the middle of the chunk."""
    m_before = (tl.arange(0, BT) < BT // 2)[:, None]
    b_middle = tl.sum(tl.where(m_before, b_gates, 0.0), 0)
    return tl.cumsum(b_gates, 0) - b_middle[None, :]


@triton.jit
def row_of(b_block, j, BT: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, BT) == j)[:, None], b_block, 0.0), 0)


@triton.jit
def column_of(b_block, j, BT: tl.constexpr):
    return tl.sum(tl.where((tl.arange(0, BT) == j)[None, :], b_block, 0.0), 1)


@triton.jit
def step_back(b_decay, b_step, j, BT: tl.constexpr):
    """From the decay between token `j` and all later ones to that between `j - 1` and them.

    A product of the decays of single tokens, as in the recurrence itself: exact for any gate.
    Zero for the tokens that are not later.
    """
    b_decay = tl.where((tl.arange(0, BT) == j)[:, None], 1.0, b_decay)
    return b_decay * row_of(b_step, j, BT)[None, :]


@triton.jit
def scores(
    b_x, b_y, b_gates, length, BT: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`sum_c x_ic y_jc e^(sum of the gates of c after j up to i)` at `[i, j]`, right for `i > j`."""
    if is_ordinary(b_gates):
        b_reach = reach(b_gates, BT)
        b_rows = (b_x * tl.exp(b_reach)).to(DOT)
        b_columns = (b_y * tl.exp(-b_reach)).to(DOT)
        b_pairs = tl.dot(b_rows, tl.trans(b_columns), input_precision=PRECISION)
    else:
        b_step = tl.exp(b_gates)
        b_decay = tl.zeros([BT, BC], tl.float32)
        b_pairs = tl.zeros([BT, BT], tl.float32)
        o_j = tl.arange(0, BT)
        for i in range(BT):
            j = BT - 1 - i
            b_y_j = row_of(b_y, j, BT)
            b_pairs_j = tl.sum(b_x * b_decay * b_y_j[None, :], 1)
            b_pairs = tl.where((o_j == j)[None, :], b_pairs_j[:, None], b_pairs)
            b_decay = step_back(b_decay, b_step, j, BT)
    return b_pairs


@triton.jit
def spread(b_pairs, b_w, b_gates, BT: tl.constexpr, BO: tl.constexpr):
    """`sum_j pairs_ij w_j e^(sum of the gates after j up to i)` under any gates."""
    b_step = tl.exp(b_gates)
    b_decay = tl.zeros([BT, BO], tl.float32)
    b_row = tl.zeros([BT, BO], tl.float32)
    for i in range(BT):
        j = BT - 1 - i
        b_row += column_of(b_pairs, j, BT)[:, None] * b_decay * row_of(b_w, j, BT)[None, :]
        b_decay = step_back(b_decay, b_step, j, BT)
    return b_row


@triton.jit
def spread_and_gather(
    b_pairs, b_r, b_w, b_past, b_scale, b_gates, BT: tl.constexpr, BO: tl.constexpr
):
    """`spread`; `sum_i pairs_ij r_i e^(...)`, its mirror; and what each gate contributes to both.

    Under any gates. A gate's share is a sum over the pairs that it stands between. It is summed as
    such: the difference of cumulative sums that equals it has no correct digit where gates are
    strong. `b_past[j]` is what token `j` adds to the shares of all later gates.
    """
    o_i = tl.arange(0, BT)
    b_step = tl.exp(b_gates)
    b_decay = tl.zeros([BT, BO], tl.float32)
    b_row = tl.zeros([BT, BO], tl.float32)
    b_col = tl.zeros([BT, BO], tl.float32)
    b_share = tl.zeros([BT, BO], tl.float32)
    for i in range(BT):
        j = BT - 1 - i
        b_effect = column_of(b_pairs, j, BT)[:, None] * b_decay
        b_w_j = row_of(b_w, j, BT)[None, :]
        b_row += b_effect * b_w_j
        b_col = tl.where((o_i == j)[:, None], tl.sum(b_effect * b_r, 0)[None, :], b_col)
        b_crossing = tl.cumsum(b_effect * b_r * b_w_j, 0, reverse=True) * b_scale
        b_crossing += row_of(b_past, j, BT)[None, :]
        b_share += tl.where((o_i > j)[:, None], b_crossing, 0.0)
        b_decay = step_back(b_decay, b_step, j, BT)
    return b_row, b_col, b_share
