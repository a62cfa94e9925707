"""Layers, blocks, language models and generation, as immutable Equinox modules."""

from ._block import Block as Block, GatedMLP as GatedMLP
from ._conv import ShortConvolution as ShortConvolution
from ._feature_map import (
    DPFP as DPFP,
    elu_plus_one as elu_plus_one,
    Hedgehog as Hedgehog,
    identity as identity,
    squared_relu as squared_relu,
)
from ._gated_linear_attention import GatedLinearAttention as GatedLinearAttention
from ._generate import generate as generate
from ._hgrn2 import HGRN2 as HGRN2
from ._language_model import LanguageModel as LanguageModel
from ._layer import AbstractLayer as AbstractLayer, AbstractMixer as AbstractMixer
from ._lightning_attention import LightningAttention as LightningAttention
from ._linear_attention import LinearAttention as LinearAttention
from ._mamba2 import Mamba2 as Mamba2
from ._output import Output as Output
from ._projection import QueryKeyValue as QueryKeyValue
from ._retention import Retention as Retention
from ._simple_gated_linear_attention import (
    SimpleGatedLinearAttention as SimpleGatedLinearAttention,
)
from ._sliding_window_attention import (
    SlidingWindowAttention as SlidingWindowAttention,
    WindowState as WindowState,
)
from ._state import RecurrentState as RecurrentState
from ._trainable import trainable as trainable
