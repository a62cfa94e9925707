"""The one place where arguments of the recurrence are checked and defaults are filled in.

`canonicalise` turns what the caller wrote into `Inputs`, the only problem a method sees:
batched, with a state, with at most one gate of each kind.
"""

import dataclasses
import numbers
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, PyTree


# What has a `seq` axis: `q`, `k`, `v`, `g`, `gk`, `gv`.
Tokens: TypeAlias = tuple[Array, Array, Array, Array | None, Array | None, Array | None]


class Inputs(eqx.Module):
    """A recurrence in canonical form. Every array but `cu_seqlens` has the batch axis first.

    A row holds `N` sequences: one without `cu_seqlens`, else those packed along `seq`, at the same
    places in every row.
    """

    q: Float[Array, "batch seq heads key"]
    k: Float[Array, "batch seq kv_heads key"]
    v: Float[Array, "batch seq kv_heads value"]
    g: Float[Array, "batch seq heads"] | None
    """Log-decay of whole states, by token."""
    gk: Float[Array, "batch seq heads key"] | None
    """Log-decay of key channels, by token."""
    gv: Float[Array, "batch seq heads value"] | None
    """Log-decay of value channels, by token."""
    g_gamma: Float[Array, "batch num_seqs heads"] | None
    """Log-decay of whole states, the same for every token of a sequence."""
    scale: Float[Array, " batch"]
    initial_state: Float[Array, "batch num_seqs heads key value"]
    cu_seqlens: Int[Array, " boundaries"] | None
    reverse: bool = eqx.field(static=True)

    @property
    def rows(self) -> "Inputs":
        """All that has the batch axis first."""
        return dataclasses.replace(self, cu_seqlens=None)

    @property
    def tokens(self) -> Tokens:
        return self.q, self.k, self.v, self.g, self.gk, self.gv

    def gradient(self, tokens: Tokens, g_gamma, scale, initial_state) -> "Inputs":
        """Gradients in the place of what they are the gradients of."""
        return Inputs(*tokens, g_gamma, scale, initial_state, None, self.reverse)

    @property
    def state_dtype(self) -> jnp.dtype:
        return self.initial_state.dtype

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        B, T, H, _ = self.q.shape
        return (B, T, H, self.v.shape[-1])

    @property
    def precision(self) -> jax.lax.Precision:
        """Of matrix products: full where an input has digits to lose."""
        narrow = all(x.dtype.itemsize == 2 for x in (self.q, self.k, self.v))
        return jax.lax.Precision.DEFAULT if narrow else jax.lax.Precision.HIGHEST

    def zeros(self, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
        """Zeros that vary over the mesh axes that the inputs vary over (see `vary_alike`)."""
        return vary_alike((jnp.zeros(shape, dtype), self.q))[0]

    def zeros_like(self, tree: PyTree[Array]) -> PyTree[Array]:
        return jax.tree.map(lambda x: self.zeros(x.shape, x.dtype), tree)


class Layout(NamedTuple):
    """What `restore` undoes after the method has run."""

    batched: bool
    packed: bool

    def restore(self, output: Array, final_state: Array) -> tuple[Array, Array]:
        if self.packed:
            final_state = final_state[0]
            return (output if self.batched else output[0]), final_state
        final_state = final_state[:, 0]
        return (output, final_state) if self.batched else (output[0], final_state[0])


def count(argument: str, number: Any, least: int = 1) -> int:
    """`number` as an `int`, for arguments that have to be known when a program is traced."""
    if isinstance(number, Tracer):
        raise ValueError(f"{argument} shapes the program: it cannot be traced, but is {number}.")
    try:
        integer = None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        integer = None
    if integer is None:
        raise ValueError(f"{argument} expects an integer, but got {number!r}.")
    if integer < least:
        raise ValueError(f"{argument} expects {least} or more, but got {number!r}.")
    return integer


def positive(argument: str, number: Any) -> float:
    if not isinstance(number, numbers.Real) or not float(number) > 0:
        raise ValueError(f"{argument} expects a number above 0, but got {number!r}.")
    return float(number)


def canonicalise(
    name: str,
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    g_gamma: Any = None,
    gk: Any = None,
    gv: Any = None,
    softmax_scale: Any = None,
    initial_state: Any = None,
    reverse: bool = False,
    cu_seqlens: Any = None,
    state_argument: str = "initial_state",
    one_token: bool = False,
    known_boundaries: bool = False,
) -> tuple[Inputs, Layout]:
    """Checks everything, once. `name` is the function the caller called, for the errors.

    With `one_token` the arrays have no `seq` axis. With `known_boundaries`, `cu_seqlens` is what
    `check_boundaries` has returned.
    """

    def fail(
        argument: str, problem: str, error: Callable[[str], Exception] = ValueError
    ) -> NoReturn:
        raise error(f"`{name}(..., {argument}=...)` {problem}")

    def as_float(argument: str, x: Any) -> Array:
        if x is None:
            fail(argument, "expects an array, but got None.")
        try:
            x = jnp.asarray(x)
        except TypeError:
            fail(argument, f"expects an array, but got {x!r}.", TypeError)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            fail(
                argument,
                f"expects a floating-point array, but has dtype {x.dtype}. Cast it, for example "
                f"with `{argument}.astype(jnp.float32)`.",
                TypeError,
            )
        return x

    def expect(argument: str, x: Array, *shapes: tuple[int, ...], meaning: str) -> None:
        if x.shape not in shapes:
            expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
            fail(argument, f"expects shape {expected}, {meaning}, but has shape {x.shape}.")

    if isinstance(reverse, Tracer):
        fail("reverse", f"shapes the program: it cannot be traced, but is {reverse}.")
    if not isinstance(reverse, bool | np.bool_):
        fail("reverse", f"expects True or False, but got {reverse!r}.")
    query, key, value = (
        as_float(argument, x) for argument, x in (("query", query), ("key", key), ("value", value))
    )
    unbatched = 2 if one_token else 3  # axes
    if query.ndim not in (unbatched, unbatched + 1):
        wanted = "4 axes (batch, seq, heads, key), or 3 without a batch"
        if one_token:
            wanted = "one token, (heads, key) or (batch, heads, key), and no sequence"
        fail("query", f"expects {wanted}, but has shape {query.shape}.")
    for argument, x in (("key", key), ("value", value)):
        if x.ndim != query.ndim or x.shape[:-2] != query.shape[:-2]:
            fail(
                argument,
                f"expects the axes of `query` before its heads, {query.shape[:-2]}, then (heads, "
                f"channels), but has shape {x.shape}.",
            )
    batched = query.ndim > unbatched
    *lead, H, K = query.shape
    B, T = lead[0] if batched else 1, 1 if one_token else lead[-1]
    Hkv, V = value.shape[-2:]
    if Hkv == 0 or H % Hkv != 0:
        fail(
            "value",
            f"has {Hkv} heads, which do not divide the {H} heads of `query`. With grouped heads "
            "every key and value head serves the same number of query heads.",
        )
    expect("key", key, (*lead, Hkv, K), meaning="heads of `value`, channels of `query`")

    packed = cu_seqlens is not None
    N = 1
    if packed:
        if B != 1:
            fail(
                "cu_seqlens",
                f"expects one packed sequence axis, but `query` has shape {query.shape}. "
                "Concatenate the sequences along `seq` (batch 1), or drop `cu_seqlens`.",
            )
        if not known_boundaries:
            cu_seqlens = check_boundaries(name, cu_seqlens, T)
        N = cu_seqlens.shape[0] - 1

    compute_dtype = jnp.float64 if jnp.float64 in (query.dtype, key.dtype, value.dtype) else None
    compute_dtype = jnp.dtype(compute_dtype or jnp.float32)

    if gk is not None:
        gk = as_float("gk", gk)
        expect("gk", gk, (*lead, H, K), meaning="one gate per key channel")
    if g is not None:
        g = as_float("g", g)
        expect("g", g, (*lead, H), (*lead, H, K), meaning="one gate per head or per key channel")
        if g.ndim == query.ndim:  # per key channel: the same thing as `gk`
            gk = g if gk is None else gk.astype(compute_dtype) + g.astype(compute_dtype)
            g = None
    if gv is not None:
        gv = as_float("gv", gv)
        expect("gv", gv, (*lead, H, V), meaning="one gate per value channel")
    if g_gamma is not None:
        g_gamma = as_float("g_gamma", g_gamma).astype(compute_dtype)
        if packed:
            expect("g_gamma", g_gamma, (H,), (N, H), meaning="one gate per head or per sequence")
        elif batched:
            expect("g_gamma", g_gamma, (H,), (B, H), meaning="one gate per head or per row")
        else:
            expect("g_gamma", g_gamma, (H,), meaning="one gate per head")
        per_sequence = (1, N, H) if packed else (B, 1, H)
        g_gamma = jnp.broadcast_to(
            g_gamma.reshape(-1, H) if packed else g_gamma.reshape(-1, 1, H), per_sequence
        )

    if softmax_scale is None:
        softmax_scale = K**-0.5 if K else 1.0
    if isinstance(softmax_scale, numbers.Real) and not isinstance(softmax_scale, bool):
        scale = jnp.asarray(softmax_scale, compute_dtype)
    else:
        scale = as_float("softmax_scale", softmax_scale).astype(compute_dtype)
        expect("softmax_scale", scale, (), meaning="a number")
    scale = jnp.broadcast_to(scale, (B,))

    state_shape = (N, H, K, V) if packed else (B, H, K, V) if batched else (H, K, V)
    if initial_state is None and not one_token:
        initial_state = jnp.zeros((B, N, H, K, V), compute_dtype)
    else:
        initial_state = as_float(state_argument, initial_state)
        rows = "one state per sequence" if packed else "one state per row" if batched else "a state"
        expect(state_argument, initial_state, state_shape, meaning=rows)
        initial_state = initial_state.astype(compute_dtype).reshape(B, N, H, K, V)

    def with_batch(x: Any) -> Any:
        if x is None:
            return None
        x = x if batched else x[None]
        return x[:, None] if one_token else x

    inputs = Inputs(
        q=with_batch(query),
        k=with_batch(key),
        v=with_batch(value),
        g=with_batch(g),
        gk=with_batch(gk),
        gv=with_batch(gv),
        g_gamma=g_gamma,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        reverse=bool(reverse),
    )
    return vary_alike(inputs), Layout(batched, packed)


def vary_alike(tree):
    """Gives every array the varying type of all of them together.

    Inside `jax.shard_map` a loop's carry must have one type throughout, while arrays made of zeros
    vary over no mesh axis. Outside of it this does nothing.
    """

    def varying(x: Array) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*map(varying, jax.tree.leaves(tree)))

    def vary(x: Array) -> Array:
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def check_boundaries(name: str, cu_seqlens: Any, T: int) -> Array:
    """`cu_seqlens` as an array. Its values are known only when the program runs.

    Inside `jax.shard_map` they go unchecked: there, devices would have to raise one by one, which
    `equinox.error_if` does not do.
    """
    cu_seqlens = jnp.asarray(cu_seqlens)
    argument = f"`{name}(..., cu_seqlens=...)`"
    if not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
        raise TypeError(f"{argument} expects integers, but has dtype {cu_seqlens.dtype}.")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"{argument} expects the boundaries of N sequences, N + 1 integers from 0 up, but has "
            f"shape {cu_seqlens.shape}."
        )
    cu_seqlens = cu_seqlens.astype(jnp.int32)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return cu_seqlens
    problems = {
        "has to start at 0": cu_seqlens[0] != 0,
        "must not decrease": jnp.any(jnp.diff(cu_seqlens) < 0),
        f"passes the end of the sequence axis, which has {T} tokens": cu_seqlens[-1] > T,
    }
    wrong = jnp.stack(list(problems.values()))
    messages = [f"{argument} {problem}." for problem in problems]
    return eqx.branched_error_if(cu_seqlens, jnp.any(wrong), jnp.argmax(wrong), messages)
