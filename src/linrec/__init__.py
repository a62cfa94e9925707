"""Gated linear recurrences (linear attention) in JAX."""

from importlib.metadata import version as _version

from . import nn as nn
from ._method.auto import Auto as Auto
from ._method.base import AbstractMethod as AbstractMethod
from ._method.chunked import Chunked as Chunked
from ._method.scan import Scan as Scan, step as step
from ._method.segmented import Segmented as Segmented
from ._method.sequence_parallel import SequenceParallel as SequenceParallel
from ._method.triton import Triton as Triton
from ._recurrent import (
    lightning_attn as lightning_attn,
    lightning_decay as lightning_decay,
    recurrent as recurrent,
    recurrent_gla as recurrent_gla,
)
from ._scan_chunks import scan_chunks as scan_chunks
from ._triton.config import KernelConfig as KernelConfig


__version__ = _version("linrec")
