"""The kernels, which are imported when a Triton method runs, and what calls them.

Their notation: `i_` index of a program or a loop, `o_` offsets, `p_` pointers, `b_` blocks of
values, `m_` masks; `BT BK BV BC BO` sizes of blocks.

| launch       | kernel   | a program does                            | and writes             |
| ------------ | -------- | ----------------------------------------- | ---------------------- |
| forward 1    | `walk`   | a sequence, head, tile of the state       | states between chunks  |
| forward 2    | `pairs`  | a chunk, head, block of value channels    | o                      |
| backward 1   | `walk`   | as forward 1, from the end                | gradients of states    |
| backward 2   | `pairs`  | a chunk, kv head, block of key channels   | dq, dk, dgk, scalars   |
| backward 3   | `pairs`  | a chunk, kv head, block of value channels | dv, dgv                |
| a few tokens | `decode` | a row, head, block of value channels      | o, the state, in place |

Scalars are the gradients of `g`, `g_gamma` and the scale.
"""
