"""The kernels. Imported only when a Triton method runs.

Notation of the kernels: `i_` program or loop index, `o_` offsets, `p_` pointers, `b_` blocks of
values, `m_` masks; `BT BK BV BC BO` sizes of blocks.

| kernel   | launch        | a program is                           | reads                 | writes |
| -------- | ------------- | -------------------------------------- | --------------------- | ------ |
| `walk`   | forward 1     | a sequence, head, tile of the state    | k, v, gates           | states |
| `pairs`  | forward 2     | a chunk, head, block of value channels | q, k, v, gates, states | o      |
| `walk`   | backward 1    | as above, from the end                 | q, do, gates          | dstates |
| `pairs`  | backward 2    | a chunk, kv head, block of key channels | everything           | dq, dk, dgk, dg |
| `pairs`  | backward 3    | a chunk, kv head, block of value channels | all but v, or everything | dv, dgv |
| `decode` | a few tokens  | a row, head, block of value channels   | everything            | o, the state in place |
"""
