"""What a step costs more when the model is in another process: ``python tests/engine/bench_worker.py``.

The same requests decode in turns in this process and in a worker's, step by step, on one thread each; nothing else
should run meanwhile. Medians of a round's steps, and their differences with 95 % intervals over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise

import torch

from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Sampling
from firsttoken.study.machine import machine_slug
from firsttoken.study.stats import bootstrap
from firsttoken_extras.worker.remote_executor import RemoteExecutor
from firsttoken_extras.worker.worker_config import WorkerConfig
from firsttoken_extras.worker.worker_model import load_worker_model

PROMPT_TOKENS = 16


def step_ms(executor: Executor, running: int, steps: int) -> list[float]:
    """Milliseconds of each of so many steps in which ``running`` requests decode."""
    config = EngineConfig(scheduler="sarathi", watermark=0.0, requests=running, token_budget=running * PROMPT_TOKENS)
    engine = Engine(executor, config)
    for request in range(running):
        engine.submit([request % 200 + 1] * PROMPT_TOKENS, Sampling(steps + 1))
    engine.step()
    times = [time.perf_counter()]
    while engine.busy:
        engine.step()
        times.append(time.perf_counter())
    return [1e3 * (after - before) for before, after in pairwise(times)]


def main() -> None:
    """Measure and print both, and what being apart adds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:tiny-2", help="as `load_model` names it")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = max(options.running) * -(-(PROMPT_TOKENS + options.steps + 1) // 16)
    config = WorkerConfig(options.model, blocks)
    print(f"{options.model}, {machine_slug()}, {options.steps} steps a round, n={options.rounds} rounds, ms a step")
    with closing(LiveExecutor(load_worker_model(config), blocks)) as here, closing(RemoteExecutor(config)) as there:
        for running in options.running:
            rows = []
            for turn in range(options.rounds + 1):  # the first warms up
                both = [statistics.median(step_ms(executor, running, options.steps)) for executor in (here, there)]
                rows += [both] if turn else []
            _tell(running, rows)


def _tell(running: int, rows: Sequence[Sequence[float]]) -> None:
    one, apart = (statistics.median(column) for column in zip(*rows, strict=True))
    more = bootstrap([apart - one for one, apart in rows], "median")
    print(f"{running:>3} running: {one:.2f} in one process, {apart:.2f} apart,", end=" ")
    print(f"{more.estimate:.2f} more [{more.low:.2f}, {more.high:.2f}]", flush=True)


if __name__ == "__main__":
    main()
