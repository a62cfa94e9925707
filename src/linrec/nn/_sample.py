import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def sample(
    logits: Float[Array, " vocab"],
    key: PRNGKeyArray,
    temperature: Float[Array, ""],
    top_k: Int[Array, ""] | None,
    top_p: Float[Array, ""] | None,
) -> Int[Array, ""]:
    """Draws a token. Everything may be traced: other settings do not compile again."""
    greedy = temperature <= 0
    scaled = logits / jnp.where(greedy, 1, temperature).astype(logits.dtype)
    if top_k is not None or top_p is not None:
        # Of tokens that are equally likely, the first is taken for the likelier, as `argmax` does.
        order = jnp.argsort(scaled, descending=True)
        descending = scaled[order]
        if top_k is not None:
            rank = jnp.arange(logits.shape[0], dtype=top_k.dtype)
            # The likeliest token stays, here and below, whatever is asked for.
            descending = jnp.where(rank < jnp.maximum(top_k, 1), descending, -jnp.inf)
        if top_p is not None:
            probability = jax.nn.softmax(descending)
            before = jnp.cumsum(probability) - probability
            keep = (before < top_p.astype(before.dtype)) | (before <= 0)
            descending = jnp.where(keep, descending, -jnp.inf)
        scaled = scaled.at[order].set(descending)
    drawn = jax.random.categorical(key, scaled)
    return jnp.where(greedy, jnp.argmax(logits), drawn).astype(jnp.int32)
