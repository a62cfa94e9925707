"""Notation. Single capitals name sizes everywhere in the package:

| letter | axis in annotations | meaning                                              |
| ------ | ------------------- | ---------------------------------------------------- |
| `B`    | `batch`             | independent rows                                     |
| `T`    | `seq`               | tokens                                               |
| `H`    | `heads`             | heads of the query, the gates and the state          |
| `Hkv`  | `kv_heads`          | heads of the key and the value; divides `H`          |
| `K`    | `key`               | channels of the query and the key                    |
| `V`    | `value`             | channels of the value and the output                 |
| `N`    | `num_seqs`          | sequences packed along `seq`: `N + 1` `boundaries`    |
| `C`    | `chunk`             | tokens that are worked on at once                    |

Log-decays begin with `g`. The state of one head has shape `(K, V)`.
"""

from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Int


AnyArray: TypeAlias = jax.Array | np.ndarray

Query: TypeAlias = Float[AnyArray, "*batch seq heads key"]
Key: TypeAlias = Float[AnyArray, "*batch seq kv_heads key"]
Value: TypeAlias = Float[AnyArray, "*batch seq kv_heads value"]
ScalarGate: TypeAlias = Float[AnyArray, "*batch seq heads"]
KeyGate: TypeAlias = Float[AnyArray, "*batch seq heads key"]
ValueGate: TypeAlias = Float[AnyArray, "*batch seq heads value"]
# One for all rows, or one for each row of the batch or for each packed sequence.
FixedGate: TypeAlias = Float[AnyArray, "*rows_or_none heads"]
Scale: TypeAlias = float | int | Float[AnyArray, ""]
State: TypeAlias = Float[AnyArray, "*rows heads key value"]
CuSeqlens: TypeAlias = Int[AnyArray, " boundaries"]

Output: TypeAlias = Float[Array, "*batch seq heads value"]
FinalState: TypeAlias = Float[Array, "*rows heads key value"]
