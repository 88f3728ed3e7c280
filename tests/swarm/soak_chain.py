"""Random deaths, returns, hangs and requests of chains without spares: is anything said that the local model does not?

``python tests/swarm/soak_chain.py --schedules 1000`` serves a tiny random model by one to four servers of this process.
It asks them from Python and over HTTP while they are killed, leave, hang, lose their sessions and come back, and counts
the answers: "right" is the local model's, "error" an answer of 500 and more or a SwarmError. A schedule is "stuck"
where its servers are well again, and nothing right is said for a minute.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from mortal import DEPTH, Known, MortalSwarm, impatient, write_known

EVENTS = {"kill": 4, "leave": 1, "hang": 2, "lose": 2, "back": 5, "back new": 3, "heal": 4}
_STUCK_S = 60.0
_AT_ONCE = 20  # schedules of one swarm


class Schedule:
    """Random schedules on ``swarm``, which is asked the ``known``."""

    def __init__(self, swarm: MortalSwarm, known: Sequence[Known], draw: random.Random) -> None:
        self.swarm, self.known, self.draw = swarm, known, draw

    def run(self, schedules: int) -> Counter[str]:
        """How all of their answers were."""
        counts: Counter[str] = Counter()
        for _ in range(schedules):
            for _ in range(self.draw.randint(2, 4)):
                if self.draw.random() < 0.7:
                    self.befall()
                counts[self.ask()] += 1
            self.swarm.heal()
            if self.draw.random() < 0.25:  # else the next one begins with what this one has left
                counts["stuck"] += not self.recovers(counts)
            counts["schedules"] += 1
        counts["stuck"] += not self.recovers(counts)
        return counts

    def befall(self) -> None:
        """Something happens to one of the servers."""
        place = self.draw.choice(self.swarm.places)
        event = self.draw.choices(list(EVENTS), list(EVENTS.values()))[0]
        if event.startswith("back"):
            place.start(same_key=event == "back")
        else:
            getattr(place, event)()

    def ask(self) -> str:
        """One request, in whose course something may happen."""
        one = self.draw.choice(self.known)
        if self.draw.random() < 0.4:
            if self.draw.random() < 0.3:
                happens = threading.Timer(self.draw.uniform(0, 0.03), self.befall)
                happens.start()
                said = self.swarm.by_http(one)
                happens.join()
                return said
            return self.swarm.by_http(one)
        cancel_after = self.draw.choice([99, 99, 99, 99, 0, 2])
        return self.swarm.by_python(one, lambda: self.befall() if self.draw.random() < 0.15 else None, cancel_after)

    def recovers(self, counts: Counter[str]) -> bool:
        """Whether both ways of asking are answered rightly again, and nothing else but errors is said until then."""
        deadline = time.monotonic() + _STUCK_S
        for ask in (self.swarm.by_python, self.swarm.by_http):
            while (said := ask(self.known[0])) != "right":
                counts[said] += 1
                if time.monotonic() > deadline:
                    return False
            counts[said] += 1
        return True


def soak(schedules: int, seed: int) -> Counter[str]:
    """How the answers of so many schedules were, over chains of one to four servers."""
    draw, counts, begun = random.Random(seed), Counter(), time.monotonic()
    with tempfile.TemporaryDirectory() as at, impatient():
        known = write_known(Path(at) / "tiny", 8)
        while counts["schedules"] < schedules:
            cuts = sorted(draw.sample(range(1, DEPTH), draw.randint(0, 3)))
            swarm = MortalSwarm(Path(at) / "tiny", list(pairwise([0, *cuts, DEPTH])))
            counts += Schedule(swarm, known, draw).run(min(_AT_ONCE, schedules - counts["schedules"]))
            kept = swarm.model.chain.kept_bytes
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
