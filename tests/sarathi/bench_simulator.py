"""How fast the simulator is, and what a scheduler's decision takes: on this machine, for whoever changes either.

    python tests/sarathi/bench_simulator.py                        # this checkout
    python tests/sarathi/bench_simulator.py --against ../older     # beside another one's simulator, in turns

The conversations are Azure's (``firsttoken fetch --from DIR``). Run it with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from firsttoken.assets.manual_downloads import downloaded
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.simulation.costs.published import PublishedCosts
from firsttoken.simulation.workload.traces import load_trace
from firsttoken.study import paths
from firsttoken.study.progress import track

CONVERSATIONS = 1000
DECODE_S = 0.01  # a decode step
BLOCKS = 25_000  # of 16 tokens: nobody is preempted
RUNNING = 256
STEPS = 200


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both. Raises AssetError when the conversations are not there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    parser.add_argument("--turns", type=int, default=5, help="processes each, one after the other (default: 5)")
    options = parser.parse_args(arguments)
    libraries = {"this checkout": paths.ROOT / "lib"}
    if options.against:
        libraries[str(options.against)] = options.against.resolve() / "lib"
    took: dict[str, list[float]] = {name: [] for name in libraries}
    for _ in track(range(options.turns), desc="replays"):
        for name, library in libraries.items():
            took[name].append(min(replayed(library)))
    for name, seconds in took.items():
        middle = statistics.median(seconds)
        print(
            f"{name}: {CONVERSATIONS} conversations in {middle:.3f} s "
            f"[{min(seconds):.3f}, {max(seconds):.3f}], {CONVERSATIONS / middle:,.0f} a second, n={len(seconds)}"
        )
    if options.against:
        ours, theirs = map(statistics.median, took.values())
        print(f"times as fast: {theirs / ours:.2f}")
    print(f"a scheduler's decision with {RUNNING} running requests, {STEPS} steps:")
    for name in SCHEDULERS:
        seconds = np.array(decisions(name)) * 1e3
        print(f"  {name:<16} {np.median(seconds):.3f} ms, P99 {np.percentile(seconds, 99):.3f} ms")


def replayed(library: Path) -> list[float]:
    """Seconds of three replays of the conversations by the simulator of ``library``, in a process of its own."""
    trace = load_trace(downloaded("azure-conversations") / "AzureLLMInferenceTrace_conv.csv")
    asked = {
        "requests": [[item.arrival_s, item.prompt_tokens, item.output_tokens] for item in trace.items[:CONVERSATIONS]],
        "scheduler": "prefill_first",
        "blocks": BLOCKS,
        "decode_s": DECODE_S,
        "repeats": 3,
    }
    command = [sys.executable, "-P", str(Path(__file__).with_name("bench_replay.py"))]
    environment = os.environ | {"PYTHONPATH": str(library)}
    ran = subprocess.run(command, input=json.dumps(asked), env=environment, check=True, capture_output=True, text=True)
    return json.loads(ran.stdout)


def decisions(scheduler: str) -> list[float]:
    """Seconds of each decision while ``RUNNING`` requests decode and prompts keep coming."""
    config = EngineConfig(
        scheduler=scheduler,
        requests=2 * RUNNING,
        prefill_tokens=256 * RUNNING,  # one batch, also where a batch is closed
        token_budget=2 * RUNNING,
        tbt_s=0.2,
        ttft_s=2.0,
    )
    engine = Engine(SimulatedExecutor(PublishedCosts(decode_s=DECODE_S), BLOCKS), config)
    running = [engine.submit([0] * 256, Sampling(4 * STEPS)) for _ in range(RUNNING)]
    while not all(request.times_s for request in running):
        engine.step()
    for number in range(STEPS // 4):
        engine.submit([0] * 1024, Sampling(2), engine.executor.now() + 8 * number * DECODE_S)
    plan, took = engine.scheduler.plan, []

    def timed() -> list:
        begun = time.perf_counter()
        chunks = plan()
        took.append(time.perf_counter() - begun)
        return chunks

    engine.scheduler.plan = timed
    while len(took) < STEPS:
        engine.step()
    return took


if __name__ == "__main__":
    main()
