"""What the engine costs beside the model, and whether it forgets: ``python tests/support/engine_soak.py``.

Many requests of a tiny model, some cancelled wherever they stand, must leave the process as large as before; and of a
step of a real model little may be spent outside the executor.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import torch
from transformers import PreTrainedModel

from firsttoken.assets.models import load_model
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.study.dtypes import AUTO, name_of, resolve
from firsttoken.study.machine import machine_slug
from firsttoken.study.stats import bootstrap
from firsttoken_studies.probes.footprint import resident

OPEN = 16  # requests at a time
BLOCKS = 48  # that these fight for
STEPS = 40


def soak(model: PreTrainedModel, requests: int, seed: int = 0) -> Iterator[int]:
    """Serve ``requests``, a third of them cancelled at a random step, two with a common beginning in four; the number
    that are over, each time that one is. Preempted ones are swapped or computed again.

    Raises AssertionError when a block is not back in the end.
    """
    rng, over = random.Random(seed), 0
    vocabulary = model.config.vocab_size
    beginning = [rng.randrange(vocabulary) for _ in range(16)]
    config = EngineConfig(
        scheduler="sarathi", preemption="swap", watermark=0.0, token_budget=64, requests=OPEN, share_prefixes=True
    )
    with closing(LiveExecutor(model, BLOCKS, block_tokens=4, host_blocks=BLOCKS)) as executor:
        engine, left = Engine(executor, config), requests
        leaves: dict = {}
        while left or leaves:
            while left and len(leaves) < OPEN:
                own = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 12))]
                prompt = beginning + own if rng.random() < 0.5 else own
                request = engine.submit(prompt, Sampling(rng.randint(1, 8)))
                leaves[request] = rng.randint(0, 6) if rng.random() < 1 / 3 else None
                left -= 1
            engine.step()
            for request, steps in list(leaves.items()):
                if steps == 0:
                    engine.cancel(request)
                elif steps:
                    leaves[request] -= 1
                if request.finished:
                    del leaves[request]
                    over += 1
                    yield over
        assert engine.pool.free == engine.pool.count and not engine.busy


def bookkeeping(model: PreTrainedModel, requests: int, scheduler: str = "sarathi") -> list[float]:
    """The share of each of ``STEPS`` steps with ``requests`` decoding that is not spent in the executor."""
    shares: list[float] = []
    with closing(LiveExecutor(model, requests * (-(-(64 + STEPS + 16) // 16)))) as executor:
        engine = Engine(executor, EngineConfig(scheduler=scheduler, watermark=0.0, requests=requests, token_budget=512))
        open_ = [engine.submit([number + 1] * 64, Sampling(STEPS + 16)) for number in range(requests)]
        while not all(len(request.times_s) > 2 for request in open_):
            engine.step()
        execute, inside = executor.execute, 0.0

        def timed(chunks):
            nonlocal inside
            begun = time.perf_counter()
            tokens = execute(chunks)
            inside = time.perf_counter() - begun
            return tokens

        executor.execute = timed
        while len(shares) < STEPS and all(not request.finished for request in open_):
            begun = time.perf_counter()
            engine.step()
            shares.append(1 - inside / (time.perf_counter() - begun))
        for request in open_:
            engine.cancel(request)
    return shares


def main() -> None:
    """Run both, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="to serve one after another")
    parser.add_argument("--at-once", type=int, default=64, help="that decode while steps are timed")
    parser.add_argument("--model", default="smollm2-135m", help="whose steps are timed")
    options = parser.parse_args()
    print(f"{machine_slug()}, {torch.get_num_threads()} threads")
    dtype, sizes = resolve(AUTO, torch.device("cpu")), []
    for over in soak(load_model("random:tiny", with_tokenizer=False).model, options.requests):
        if over % max(1, options.requests // 10) == 0:
            gc.collect()
            sizes.append((over, resident() / 2**20))
            print(f"  {over} requests over: {sizes[-1][1]:.1f} MiB resident", flush=True)
    if len(sizes) > 1:
        (first, before), (last, after) = sizes[0], sizes[-1]
        each = 1024 * (after - before) / (last - first)
        print(f"between request {first} and {last}: {after - before:+.2f} MiB, {each:+.3f} KiB a request")
    model = fuse(load_model(options.model, dtype=dtype, with_tokenizer=False).model)
    shares = bookkeeping(model, options.at_once)
    found = bootstrap(shares, "median")
    print(
        f"{options.model}, {name_of(dtype)}, {options.at_once} decode: {100 * found.estimate:.2f} % "
        f"[{100 * found.low:.2f}, {100 * found.high:.2f}] of a step outside the executor, P99 "
        f"{100 * np.percentile(shares, 99):.2f} %, n={found.n} steps (goal 5)"
    )


if __name__ == "__main__":
    main()
