"""Contestants that are written in torch."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ._programs import Inputs, Program


def run_torch(run: Callable, inputs: Inputs, cotangent: Any) -> Program:
    """As `compile_jax`, for a function of torch tensors: nothing is compiled, memory not known."""
    import torch  # pyright: ignore[reportMissingImports]

    def to_torch(x: Array):
        # By way of float32, since numpy and torch share no bfloat16.
        return torch.tensor(np.asarray(x.astype(jnp.float32))).to(getattr(torch, x.dtype.name))

    tensors = {name: to_torch(x) for name, x in inputs.items()}

    def forward():
        with torch.no_grad():
            return {"output": run(tensors).float()}

    def forward_and_backward(along):
        leaves = {name: x.requires_grad_() for name, x in tensors.items()}
        output = run(leaves)
        gradients = torch.autograd.grad(output, list(leaves.values()), along.to(output.dtype))
        named = zip(leaves, gradients, strict=True)
        return {"output": output.detach().float()} | {
            f"gradient of {name}": x.float() for name, x in named
        }

    if cotangent is None:
        return Program(forward, None, None)
    along = to_torch(cotangent)
    return Program(lambda: forward_and_backward(along), None, None)
