"""Notation. Single capitals name sizes everywhere in the package:

| letter | axis in annotations | meaning                                              |
| ------ | ------------------- | ---------------------------------------------------- |
| `B`    | `batch`             | independent rows                                     |
| `T`    | `seq`               | tokens                                               |
| `H`    | `heads`             | heads of the query, the gates and the state          |
| `Hkv`  | `kv_heads`          | heads of the key and the value; divides `H`          |
| `K`    | `key`               | channels of the query and the key                    |
| `V`    | `value`             | channels of the value and the output                 |
| `N`    | `num_seqs`          | sequences packed along `seq`                         |
| `C`    | `chunk`             | tokens that are worked on at once                    |

Log-decays begin with `g`. The state of one head has shape `(K, V)`.
"""

from typing import TypeAlias

from jaxtyping import Array, Float, Int


Query: TypeAlias = Float[Array, "*batch seq heads key"]
Key: TypeAlias = Float[Array, "*batch seq kv_heads key"]
Value: TypeAlias = Float[Array, "*batch seq kv_heads value"]
Output: TypeAlias = Float[Array, "*batch seq heads value"]
ScalarGate: TypeAlias = Float[Array, "*batch seq heads"]
KeyGate: TypeAlias = Float[Array, "*batch seq heads key"]
ValueGate: TypeAlias = Float[Array, "*batch seq heads value"]
# `*rows`: the batch axis if there is one, or the packed sequences.
FixedGate: TypeAlias = Float[Array, "*rows heads"]
State: TypeAlias = Float[Array, "*rows heads key value"]
CuSeqlens: TypeAlias = Int[Array, " num_seqs+1"]
