"""Each layer against the formulas of its paper, token by token in float64 numpy.

Nothing here calls linrec but to make the parameters and for the result that is checked.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from linrec import nn


T, D = 11, 12


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms_norm(x, weight=1.0, eps=1e-5):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * weight


def check(layer, reference):
    x = np.random.default_rng(0).standard_normal((T, D))
    y, _ = eqx.filter_jit(layer)(jnp.asarray(x))
    assert y.dtype == jnp.float64
    parameters = jax.tree.map(lambda p: np.asarray(p, np.float64), eqx.filter(layer, eqx.is_array))
    np.testing.assert_allclose(y, reference(parameters, x), rtol=1e-6, atol=1e-7)


def make(kind, *arguments, **options):
    return kind(D, *arguments, **options, dtype=jnp.float64, key=jax.random.key(0))


def heads_of(layer, parameters, x):
    """q, k, v of every query head: grouped heads written out."""
    H, Hkv, K, V = (
        layer.qkv.num_heads,
        layer.qkv.num_kv_heads,
        layer.qkv.key_size,
        layer.qkv.value_size,
    )
    qkv = x @ parameters.qkv.linear.weight.T
    q, k, v = np.split(qkv, [H * K, H * K + Hkv * K], axis=-1)
    group = np.arange(H) // (H // Hkv)
    k, v = k.reshape(-1, Hkv, K)[:, group], v.reshape(-1, Hkv, V)[:, group]
    return q.reshape(-1, H, K), k, v


def test_linear_attention():
    layer = make(nn.LinearAttention, 4, 2)

    def reference(p, x):
        q, k, v = heads_of(layer, p, x)
        phi = lambda a: np.where(a > 0, a + 1, np.exp(a))
        o = np.zeros_like(q)
        for t in range(T):
            for h in range(4):
                similarity = phi(k[: t + 1, h]) @ phi(q[t, h])
                o[t, h] = similarity @ v[: t + 1, h] / np.sum(similarity)
        return o.reshape(T, -1) @ p.output.linear.weight.T

    check(layer, reference)


def test_gated_linear_attention():
    layer = make(nn.GatedLinearAttention, 2, key_size=5)

    def reference(p, x):
        q, k, v = heads_of(layer, p, x)
        logits = x @ p.gate_down.weight.T @ p.gate_up.weight.T + p.gate_up.bias
        alpha = sigmoid(logits).reshape(q.shape) ** (1 / 16)
        o = np.zeros_like(v)
        for h in range(2):
            S = np.zeros((5, 6))
            for t in range(T):
                S = alpha[t, h][:, None] * S + np.outer(k[t, h], v[t, h])
                o[t, h] = q[t, h] @ S / np.sqrt(5)
        o = rms_norm(o, p.output.norm.weight).reshape(T, -1)
        return (silu(x @ p.output.gate.weight.T) * o) @ p.output.linear.weight.T

    check(layer, reference)


def test_simple_gated_linear_attention():
    layer = make(nn.SimpleGatedLinearAttention, 2, gate_temperature=4.0)

    def reference(p, x):
        q, k, v = heads_of(layer, p, x)
        alpha = sigmoid(x @ p.gate.weight.T + p.gate.bias) ** 0.25
        o = np.zeros_like(v)
        for t in range(T):
            for h in range(2):
                for s in range(t + 1):
                    decay = np.prod(alpha[s + 1 : t + 1, h])
                    o[t, h] += decay * (q[t, h] @ k[s, h]) * v[s, h] / np.sqrt(3)
        o = rms_norm(o, p.output.norm.weight).reshape(T, -1)
        return (silu(x @ p.output.gate.weight.T) * o) @ p.output.linear.weight.T

    check(layer, reference)


@pytest.mark.parametrize(
    ("slopes", "num_heads", "expected"),
    [
        ("linear", 4, 2 * (1 - 1 / 3) * np.arange(4)),
        ("geometric", 4, (1 - 1 / 2 + 1e-5) * 2.0 ** -np.array([2, 4, 6, 8])),
        ("geometric", 3, (1 - 1 / 2 + 1e-5) * 2.0 ** -np.array([4, 8, 2])),
    ],
)
def test_lightning_attention(slopes, num_heads, expected):
    layer = make(nn.LightningAttention, num_heads, layer_idx=1, num_layers=3, slopes=slopes)

    def reference(p, x):
        q, k, v = (silu(a) for a in heads_of(layer, p, x))
        o = np.zeros_like(v)
        for t in range(T):
            for h in range(num_heads):
                for s in range(t + 1):
                    o[t, h] += np.exp(-expected[h] * (t - s)) * (q[t, h] @ k[s, h]) * v[s, h]
        o = rms_norm(o.reshape(T, -1), p.output.norm.weight)
        return (sigmoid(x @ p.output.gate.weight.T) * o) @ p.output.linear.weight.T

    check(layer, reference)


def test_retention():
    layer = make(nn.Retention, 2)

    def reference(p, x):
        """The parallel form: (Q K^T * D) V, with rotations as complex numbers."""
        q, k, v = heads_of(layer, p, x)
        theta = 10_000.0 ** (-np.arange(3) / 3)
        turn = np.exp(1j * np.arange(T)[:, None] * theta)[:, None]
        as_complex = lambda a: a[..., :3] + 1j * a[..., 3:]
        q, k = as_complex(q) * turn, as_complex(k) * turn
        o = np.zeros_like(v)
        for h, gamma in enumerate([1 - 2**-5, 1 - 2**-6]):
            distance = np.arange(T)[:, None] - np.arange(T)
            decay = np.where(distance >= 0, gamma ** np.maximum(distance, 0), 0)
            o[:, h] = (np.real(q[:, h] @ k[:, h].conj().T) / np.sqrt(6) * decay) @ v[:, h]
        o = o - np.mean(o, -1, keepdims=True)
        o = rms_norm(o).reshape(T, -1)
        return (silu(x @ p.output.gate.weight.T) * o) @ p.output.linear.weight.T

    check(layer, reference)


def test_hgrn2():
    layer = make(nn.HGRN2, 2, key_size=5, lower_bound=0.25)

    def reference(p, x):
        q, f, v = heads_of(layer, p, x)
        f = 0.25 + 0.75 * sigmoid(f)
        o = np.zeros_like(v)
        for h in range(2):
            S = np.zeros((5, 6))
            for t in range(T):
                S = f[t, h][:, None] * S + np.outer(1 - f[t, h], v[t, h])
                o[t, h] = silu(q[t, h]) @ S
        o = rms_norm(o.reshape(T, -1), p.output.norm.weight)
        return o @ p.output.linear.weight.T

    check(layer, reference)


def test_mamba2():
    H, G, N, P = 6, 2, 5, 4
    layer = make(nn.Mamba2, num_groups=G, key_size=N, value_size=P)

    def reference(p, x):
        z, xBC, dt = np.split(x @ p.project.weight.T, [H * P, 2 * H * P + 2 * G * N], axis=-1)
        padded = np.concatenate([np.zeros((3, xBC.shape[1])), xBC])
        xBC = silu(sum(p.conv.weight[i] * padded[i : i + T] for i in range(4)) + p.conv.bias)
        u, B, C = np.split(xBC, [H * P, H * P + G * N], axis=-1)
        u, B, C = u.reshape(T, H, P), B.reshape(T, G, N), C.reshape(T, G, N)
        dt = softplus(dt + p.dt_bias)
        A = -np.exp(p.A_log)
        y = np.zeros_like(u)
        for h in range(H):
            state = np.zeros((P, N))
            for t in range(T):
                g = h // (H // G)
                state = np.exp(dt[t, h] * A[h]) * state + dt[t, h] * np.outer(u[t, h], B[t, g])
                y[t, h] = state @ C[t, g] + p.D[h] * u[t, h]
        y = y.reshape(T, -1)
        return rms_norm(y * silu(z), p.norm.weight) @ p.output.weight.T

    check(layer, reference)


def test_sliding_window_attention():
    layer = make(nn.SlidingWindowAttention, 2, 1, window=4)

    def reference(p, x):
        q, k, v = heads_of(layer, p, x)
        theta = 10_000.0 ** (-np.arange(3) / 3)
        turn = np.exp(1j * np.arange(T)[:, None] * theta)[:, None]
        as_complex = lambda a: a[..., :3] + 1j * a[..., 3:]
        q, k = as_complex(q) * turn, as_complex(k) * turn
        o = np.zeros_like(v)
        for t in range(T):
            for h in range(2):
                seen = slice(max(0, t - 3), t + 1)
                weight = np.exp(np.real(k[seen, h].conj() @ q[t, h]) / np.sqrt(6))
                o[t, h] = weight @ v[seen, h] / np.sum(weight)
        return o.reshape(T, -1) @ p.output.linear.weight.T

    check(layer, reference)


def test_short_convolution():
    layer = make(nn.GatedLinearAttention, 2, conv_size=3)
    x = np.random.default_rng(0).standard_normal((T, D))
    with_conv, _ = eqx.filter_jit(layer)(jnp.asarray(x))

    weight = np.asarray(layer.qkv.linear.weight)
    padded = np.concatenate([np.zeros((2, weight.shape[0])), x @ weight.T])
    qkv = silu(sum(np.asarray(layer.qkv.conv.weight)[i] * padded[i : i + T] for i in range(3)))
    # The same layer without a convolution, on an input that makes the same q, k and v.
    bare = eqx.tree_at(
        lambda layer: (layer.qkv.conv, layer.state.conv, layer.qkv.linear.weight),
        layer,
        (None, None, jnp.asarray(np.linalg.lstsq(x, qkv, rcond=None)[0].T)),
    )
    without, _ = eqx.filter_jit(bare)(jnp.asarray(x))
    np.testing.assert_allclose(with_conv, without, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("feature_map", "expected"),
    [
        (nn.identity, lambda x: x),
        (nn.elu_plus_one, lambda x: np.where(x > 0, x + 1, np.exp(x))),
        (nn.squared_relu, lambda x: np.maximum(x, 0) ** 2),
        (nn.DPFP(2), lambda x: _dpfp(x, 2)),
        (nn.Hedgehog(5, dtype=jnp.float64), lambda x: _hedgehog(x)),
    ],
)
def test_feature_map(feature_map, expected):
    x = np.random.default_rng(0).standard_normal(5)
    np.testing.assert_allclose(feature_map(jnp.asarray(x)), expected(x), rtol=1e-12)


def _dpfp(x, nu):
    r = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)])
    return np.array([r[i] * r[(i - j) % len(r)] for j in range(1, nu + 1) for i in range(len(r))])


def _hedgehog(x):
    return np.concatenate([np.exp(x) / np.exp(x).sum(), np.exp(-x) / np.exp(-x).sum()])


def test_rotary_far_out():
    """A million tokens on, what counts is still the distance alone."""
    from linrec.nn._rotary import rotate

    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 64), jnp.float32)
    product = lambda at, distance: jnp.sum(
        rotate(q, jnp.array([at + distance], jnp.int32)) * rotate(k, jnp.array([at], jnp.int32))
    )
    for distance in (0, 1, 77):
        near, far = product(0, distance), product(1_234_567, distance)
        np.testing.assert_allclose(far, near, atol=1e-5)
