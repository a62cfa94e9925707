"""Continues a text with a model that `train_lm.py` has trained."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
from _common import at_least, load_model, make_parser, some_text, text_printer

import linrec


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "checkpoint", type=Path, nargs="?", default=Path("lm/model.eqx"), help="of `train_lm.py`"
    )
    parser.add_argument("--prompt", type=some_text, default="import ", help="text to continue")
    parser.add_argument("--tokens", type=at_least(2), default=1000, help="to write")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token")
    parser.add_argument("--top-k", type=at_least(1), help="draw from that many likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw from the likeliest, this probable together"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    args = parser.parse_args()

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
