"""Random deaths, returns, hangs and requests of chains without spares: is anything said that the local model does not?

``python tests/petals/soak_chain.py --schedules 1000`` serves a tiny random model by one to four servers of this
process. It asks them from Python and over HTTP while they are killed, leave, hang, lose their sessions and come back,
and counts the answers: "right" is the local model's, "error" an answer of 500 and more or a SwarmError. A schedule is
"stuck" where its servers are well again, and nothing right is said for a minute.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from mortal import DEPTH, MortalSwarm, Schedules, impatient, write_known

_AT_ONCE = 20  # schedules of one swarm


def soak(schedules: int, seed: int) -> Counter[str]:
    """How the answers of so many schedules were, over chains of one to four servers."""
    draw, counts, begun = random.Random(seed), Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as at, impatient():
        known = write_known(Path(at) / "tiny", 8)
        while counts["schedules"] < schedules:
            cuts = sorted(draw.sample(range(1, DEPTH), draw.randint(0, 3)))
            swarm = MortalSwarm(Path(at) / "tiny", list(pairwise([0, *cuts, DEPTH])))
            counts += Schedules(swarm, known, draw).run(min(_AT_ONCE, schedules - counts["schedules"]))
            kept = swarm.model.chain._hidden_cache.nbytes
            swarm.close()
            counts["kept"] += kept
            print(f"{time.monotonic() - begun:.0f} s, {len(cuts) + 1} servers: {dict(counts)}", flush=True)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = soak(options.schedules, options.seed)
    assert not counts["wrong"], "an answer is not the local model's"
    assert not counts["stuck"], "a chain did not recover"
    assert not counts["kept"], "hidden states are kept of requests that are over"
