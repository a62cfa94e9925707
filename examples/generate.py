"""Continues a text with a model that `train_lm.py` has trained."""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import load_model, text_printer

import linrec


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path("lm/model.eqx"))
    parser.add_argument("--prompt", default="import ")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.checkpoint.exists():
        parser.error(f"there is no {args.checkpoint}: train a model with `train_lm.py` first")

    model = load_model(args.checkpoint)
    times = []
    show = text_printer()

    def on_token(token) -> None:
        show(token)
        times.append(time.perf_counter())

    print(args.prompt, end="", flush=True)
    tokens, _ = linrec.nn.generate(
        model,
        jnp.array(list(args.prompt.encode())),
        args.tokens,
        jax.random.key(args.seed),
        args.temperature,
        args.top_k,
        args.top_p,
        callback=on_token,
    )
    jax.block_until_ready(tokens)
    speed = (len(times) - 1) / (times[-1] - times[0])
    print(f"\n\n{len(times)} tokens, {speed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
