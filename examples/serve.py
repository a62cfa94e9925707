"""Serves a language model on one device: continuous batching with a fixed set of slots.

Requests come in over time, with prompts of different lengths. Prompts that wait are packed into one
sequence (`cu_seqlens`) and run together; their states go to free slots. All slots decode together,
one token of each with every step. A request that is done leaves its slot to the next one. Shapes
never change, so that two programs are compiled and no more. In the end every answer is compared
with decoding its prompt alone. Takes less than a minute.
"""

import dataclasses
import time
from collections import deque
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import at_least, load_model, make_model, make_parser, positive, progress_bar, read_text


@dataclasses.dataclass
class Request:
    prompt: np.ndarray
    max_tokens: int
    arrival: float  # seconds, as all times
    answer: list[int] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)  # of the answer's tokens


@eqx.filter_jit(donate="all-except-first")
def prefill(model, slots, packed, cu_seqlens, places):
    """Runs packed prompts; puts each one's state, and the token that follows, into its place."""
    logits, states = model(packed, cu_seqlens=cu_seqlens)
    tokens = jnp.argmax(logits[cu_seqlens[1:] - 1], axis=-1)
    # Prompts that are not there, since fewer came than could, have a place that is not there.
    put = lambda old, new: old.at[places].set(new, mode="drop")
    return jax.tree.map(put, slots, (tokens, states))


@eqx.filter_jit(donate="all-except-first")
def decode(model, slots):
    """One token more in all slots, the likeliest."""
    logits, states = jax.vmap(lambda token, state: model.step(token, state))(*slots)
    return jnp.argmax(logits, axis=-1), states


@eqx.filter_jit
def shortfall(model, text, begin, end):
    """By how much the tokens from `begin` to `end` miss being the likeliest, token by token."""
    _, logits = jax.lax.scan(
        lambda state, token: model.step(token, state)[::-1], model.initial_state(), text[:-1]
    )
    chosen = jnp.take_along_axis(logits, text[1:, None], axis=-1)[:, 0]
    place = 1 + jnp.arange(len(chosen))
    answer = (begin <= place) & (place < end)
    return jnp.max(jnp.max(logits, axis=-1) - chosen, where=answer, initial=0)


def take(waiting: deque[Request], free: int, now: float, buffer: int) -> list[Request]:
    """Those that have arrived, as many as there are free slots, and as fit into one buffer."""
    taken = []
    while waiting and len(taken) < free and waiting[0].arrival <= now:
        buffer -= len(waiting[0].prompt)
        if buffer < 0:
            break
        taken.append(waiting.popleft())
    return taken


def pack(requests: list[Request], free: list[int], num_slots: int, buffer: int):
    """The prompts in one array, where each begins and ends, and the slot for each."""
    packed = np.zeros(buffer, np.int32)
    ends = np.cumsum([len(request.prompt) for request in requests])
    packed[: ends[-1]] = np.concatenate([request.prompt for request in requests])
    spare = num_slots - len(requests)
    cu_seqlens = np.concatenate([[0], ends, np.full(spare, ends[-1])]).astype(np.int32)
    places = np.array(free[: len(requests)] + [num_slots] * spare, np.int32)
    return packed, cu_seqlens, places


def serve(title: str, model, requests: list[Request], num_slots: int, buffer: int) -> None:
    """Answers all requests."""
    empty = (jnp.zeros((), jnp.int32), model.initial_state())
    slots = jax.tree.map(lambda x: jnp.stack([x] * num_slots), empty)
    running: dict[int, Request] = {}
    waiting = deque(requests)
    columns = ("{task.fields[running]:2} running", "{task.fields[speed]:,.0f} tok/s")
    with progress_bar(*columns) as bar:
        task = bar.add_task(title, total=len(requests), running=0, speed=0.0)
        start, tokens = time.perf_counter(), 0
        while waiting or running:
            now = time.perf_counter() - start
            free = [place for place in range(num_slots) if place not in running]
            if joining := take(waiting, len(free), now, buffer):
                slots = prefill(model, slots, *pack(joining, free, num_slots, buffer))
                served = dict(zip(free, joining, strict=False))
                running |= served
            elif running:
                slots, served = decode(model, slots), dict(running)
            else:
                time.sleep(waiting[0].arrival - now)
                continue
            new_tokens = np.asarray(slots[0])
            now = time.perf_counter() - start
            for place, request in served.items():
                request.answer.append(int(new_tokens[place]))
                request.times.append(now)
                if len(request.answer) == request.max_tokens:
                    del running[place]
                    bar.advance(task)
            tokens += len(served)
            bar.update(task, running=len(running), speed=tokens / now)


def report(requests: list[Request], seconds: float) -> None:
    tokens = sum(len(request.answer) for request in requests)
    print(f"{len(requests)} requests, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s")
    latencies = {
        "to the first token": [r.times[0] - r.arrival for r in requests],
        "between tokens": np.concatenate([np.diff(r.times) for r in requests]),
        "to the last token": [r.times[-1] - r.arrival for r in requests],
    }
    percents = (50, 90, 99)
    print(f"{'latency, ms':>20}" + "".join(f"{f'p{percent}':>10}" for percent in percents))
    for name, values in latencies.items():
        milliseconds = np.percentile(values, percents) * 1e3
        print(f"{name:>20}" + "".join(f"{value:10.1f}" for value in milliseconds))


def check(model, requests: list[Request], length: int) -> None:
    """Every answer is that of decoding its prompt alone, but for ties."""
    for request in requests:
        text = np.concatenate([request.prompt, request.answer]).astype(np.int32)
        padded = np.pad(text, (0, length - len(text)))
        begin, end = jnp.array([len(request.prompt), len(text)])
        missed = float(shortfall(model, padded, begin, end))
        if missed > 1e-3:
            raise SystemExit(f"an answer differs from decoding alone, by {missed} in a logit")
    print("every answer equals that of decoding alone")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", help="of `train_lm.py`")
    parser.add_argument("--requests", type=at_least(1), default=300, help="to serve")
    parser.add_argument("--rate", type=positive, default=40.0, help="of arrivals, per second")
    parser.add_argument("--slots", type=at_least(1), default=16, help="requests decoded together")
    parser.add_argument("--prompt", type=at_least(1), default=200, help="tokens at most")
    parser.add_argument(
        "--tokens", type=at_least(1), default=100, help="tokens of an answer at most"
    )
    parser.add_argument("--buffer", type=at_least(1), default=512, help="tokens prefilled together")
    args = parser.parse_args()
    if args.prompt > args.buffer:
        parser.error("a prompt has to fit into the buffer")

    if args.checkpoint is None:
        print("no checkpoint given: a model that has learnt nothing, and says so")
        model = make_model("GatedLinearAttention", 128, 2, key=jax.random.key(0))
    else:
        model = load_model(args.checkpoint)

    rng = np.random.default_rng(0)
    _, text = read_text(None, args.prompt + 1)
    arrivals = np.cumsum(rng.exponential(1 / args.rate, args.requests))
    requests = []
    for arrival in arrivals:
        length = rng.integers(1, args.prompt, endpoint=True)
        begin = rng.integers(len(text) - length)
        max_tokens = rng.integers(1, args.tokens, endpoint=True)
        requests.append(Request(text[begin : begin + length], max_tokens, arrival))

    # Compile before the first request comes in.
    serve("compiling", model, [Request(text[:1], 2, 0.0)], args.slots, args.buffer)
    serve("serving", model, requests, args.slots, args.buffer)
    report(requests, requests[-1].times[-1])
    check(model, requests, args.prompt + args.tokens)


if __name__ == "__main__":
    main()
