"""Every layer of `linrec.nn`, small. A new layer is tested by adding it here."""

from linrec import nn


SIZE = 12
VOCAB = 17
LENGTH = 13


def mixers(**options):
    """`{name: make(key)}`. `options` go to all of them."""
    kinds = {
        "linear_attention": (nn.LinearAttention, dict(num_heads=4, num_kv_heads=2)),
        "linear_attention_hedgehog": (
            nn.LinearAttention,
            dict(num_heads=2, feature_map=nn.Hedgehog(6, **options), conv_size=2),
        ),
        "gated_linear_attention": (
            nn.GatedLinearAttention,
            dict(num_heads=4, num_kv_heads=2, key_size=5, value_size=3, conv_size=3),
        ),
        "simple_gated_linear_attention": (nn.SimpleGatedLinearAttention, dict(num_heads=2)),
        "lightning_attention": (
            nn.LightningAttention,
            dict(num_heads=3, layer_idx=1, num_layers=3, slopes="geometric"),
        ),
        "retention": (nn.Retention, dict(num_heads=2)),
        "hgrn2": (nn.HGRN2, dict(num_heads=4, num_kv_heads=2, key_size=5)),
        "mamba2": (nn.Mamba2, dict(key_size=5, value_size=4, num_groups=2)),
        "sliding_window_attention": (
            nn.SlidingWindowAttention,
            dict(num_heads=2, num_kv_heads=1, window=4),
        ),
    }

    def make(kind, arguments):
        return lambda key: kind(SIZE, **arguments, **options, key=key)

    return {name: make(*case) for name, case in kinds.items()}


def layers(**options):
    """The mixers, a block and a model."""

    def block(key):
        return nn.Block(nn.Retention(SIZE, 2, **options, key=key), mlp_size=8, **options, key=key)

    def hybrid(layer_idx, key):
        if layer_idx % 2 == 1:
            return nn.SlidingWindowAttention(SIZE, 2, window=4, **options, key=key)
        return nn.GatedLinearAttention(SIZE, 2, **options, key=key)

    def model(key):
        return nn.LanguageModel(hybrid, 4, VOCAB, mlp_size=8, **options, key=key)

    return {**mixers(**options), "block": block, "hybrid_model": model}
