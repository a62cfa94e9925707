"""The launches of the forward pass."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton.language as tl
from jaxtyping import Array, Float, Int

from .._inputs import Inputs
from .call import call
from .config import default_config, fit, KernelConfig, Launch, Pairs
from .pairs import pairs_kernel
from .walk import walk_kernel


class Problem(NamedTuple):
    """The sizes of a problem, and the constants that all kernels take."""

    B: int
    T: int
    H: int
    K: int
    V: int
    N: int
    groups: int
    slots: int
    """Chunks of a row, with some to spare if sequences are packed: see `find_sequence`."""
    dot_dtype: Any
    config: KernelConfig
    launch: Launch
    constants: dict[str, Any]

    @staticmethod
    def of(
        launch: Launch, rows: Inputs, cu_seqlens: Int[Array, "batch boundaries"] | None
    ) -> "Problem":
        B, T, H, K = rows.q.shape
        N, V = rows.initial_state.shape[1], rows.v.shape[-1]
        # Factors e^A overflow float16: tensor cores take it as tf32, which has as many digits.
        types = {x.dtype for x in (rows.q, rows.k, rows.v)}
        brief = types == {jnp.dtype(jnp.bfloat16)}
        half = all(x.itemsize == 2 for x in types)
        config = launch.config or default_config(
            rows.gk is not None, rows.gv is not None, not brief
        )
        chunk = config.chunk
        slots = -(-T // chunk) if cu_seqlens is None else T // chunk + N + 1
        constants = dict(
            H=H,
            BT=chunk,
            DOT=tl.bfloat16 if brief else tl.float32,
            PRECISION="tf32" if half else launch.input_precision,
            USE_G=rows.g is not None,
            USE_GAMMA=rows.g_gamma is not None,
            PACKED=cu_seqlens is not None,
            REVERSE=rows.reverse,
        )
        dot_dtype = jnp.bfloat16 if brief else jnp.float32
        groups = H // rows.k.shape[2]
        return Problem(
            B, T, H, K, V, N, groups, slots, dot_dtype, config, launch, constants
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.T, self.N, self.slots

    def walk(self, x, y, rows: Inputs, cu_seqlens, start, backward: bool):
        """The states before every chunk, in the direction of the walk, and the last one."""
        config, struct = self.config.walk, jax.ShapeDtypeStruct
        BK, BV = fit(config.key, self.K), fit(config.value, self.V)
        return call(
            "backward_walk" if backward else "walk",
            walk_kernel,
            (x, y, rows.gk, rows.gv, rows.g, rows.g_gamma, rows.scale, cu_seqlens, start),
            self.sizes,
            (
                struct((self.B, self.slots, self.H, self.K, self.V), self.dot_dtype),
                struct(start.shape, jnp.float32),
            ),
            grid=(self.B * self.N * self.H, -(-self.K // BK), -(-self.V // BV)),
            **self.launch.target(config.warps, config.stages),
            **self.constants,
            GROUP=1 if backward else self.groups,
            K=self.K,
            V=self.V,
            BK=BK,
            BV=BV,
            USE_GK=rows.gk is not None,
            USE_GV=rows.gv is not None,
            FACTOR=tl.float32,
            BACKWARD=backward,
        )

    def pairs(
        self, name: str, config: Pairs, rows: Inputs, cu_seqlens, x, y, r, w, h, dh, outputs, *,
        out_is_key: bool,
    ):  # fmt: skip
        """See the kernel, which computes those of its outputs that are not `None`."""
        row, col, d_go, *_, d_scale = (x is not None for x in outputs)
        heads = self.groups if col else 1
        C, O = (self.V, self.K) if out_is_key else (self.K, self.V)  # noqa: E741
        gc, go = (rows.gv, rows.gk) if out_is_key else (rows.gk, rows.gv)
        BO = fit(config.outer, O)
        # A block that was cut down takes fewer warps, of which more programs fit a processor.
        warps = min(config.warps, max(4, config.warps * BO // config.outer))
        return call(
            name,
            pairs_kernel,
            (x, y, r, w, gc, go, rows.g, rows.g_gamma, rows.scale, cu_seqlens, h, dh),
            self.sizes,
            outputs,
            grid=(self.B * self.slots * self.H // heads, -(-O // BO)),
            **self.launch.target(warps, config.stages),
            **self.constants,
            GROUP=self.groups,
            HEADS=heads,
            C=C,
            O=O,
            O_IS_KEY=out_is_key,
            BC=fit(config.inner, C),
            BO=BO,
            STEPS=(self.N + 1).bit_length(),
            USE_GC=gc is not None,
            USE_GO=go is not None,
            ROW=row,
            COL=col,
            # Gates' gradients are differences: they take more digits than bfloat16 has.
            FACTOR=tl.float32 if d_go else self.constants["DOT"],
            GRAD_GO=d_go,
            GRAD_SCALAR=d_scale,
        )


def forward(
    launch: Launch, rows: Inputs, cu_seqlens: Int[Array, "batch boundaries"] | None
) -> tuple[Array, Array, Float[Array, "batch slots heads key value"]]:
    """The output, the final states, and the states before every chunk."""
    problem = Problem.of(launch, rows, cu_seqlens)
    states, final_state = problem.walk(
        rows.k, rows.v, rows, cu_seqlens, rows.initial_state, backward=False
    )
    output = jax.ShapeDtypeStruct(rows.output_shape, rows.v.dtype)
    output, *_ = problem.pairs(
        "output", problem.config.output, rows, cu_seqlens,
        rows.q, rows.k, None, rows.v, states, None,
        (output, None, None, None, None, None), out_is_key=False,
    )  # fmt: skip
    return output, final_state, states
