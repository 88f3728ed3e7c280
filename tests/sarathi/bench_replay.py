"""One replay on the simulator, timed: a script for the library of any revision on its path (``bench_simulator.py``).

Reads {requests: [[arrival in s, prompt, answer], ...], scheduler, blocks, decode_s, repeats} from stdin and prints the
seconds of each repeat. It imports nothing that the first simulator did not have.
"""

from __future__ import annotations

import json
import sys
import time

from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import Sampling
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.simulation.costs.published import PublishedCosts


def main() -> None:
    """Replay what stdin says."""
    asked = json.load(sys.stdin)
    items = [((0,) * prompt, Sampling(answer), at_s) for at_s, prompt, answer in asked["requests"]]
    seconds = []
    for _ in range(asked["repeats"]):
        costs = PublishedCosts(decode_s=asked["decode_s"])
        engine = Engine(SimulatedExecutor(costs, asked["blocks"]), EngineConfig(scheduler=asked["scheduler"]))
        begun = time.perf_counter()
        engine.serve(items)
        seconds.append(time.perf_counter() - begun)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
