"""Bystanders beside clients that cancel, flood, vanish and hoard: are their tokens the local model's, and how late?

``python tests/petals/soak_sessions.py --schedules 1000 --seed 0`` serves a tiny random model by two servers of half its
blocks each in this process. In each schedule one to three honest clients ask for an answer each while one to three
others disturb them, in ways, numbers and delays that the schedule's seed draws. Beside it all the books of both servers
are checked. Each honest client's tokens must be the local model's. It should have them within twice the time that it
takes alone plus its patience with one step; how late the latest were is printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from bystanders import Found, Soak, questions

from firsttoken.petals.local_swarm import varied_model

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the others count up")
    options = parser.parse_args()
    found, begun = Found(), time.monotonic()
    with tempfile.TemporaryDirectory() as at:
        varied_model().save_pretrained(folder := Path(at) / "tiny")
        with Soak(folder, questions(30)) as soak:
            for number in range(options.schedules):
                soak.schedule(options.seed + number, found)
                if number % 50 == 49:
                    soak.left()
                    print(f"{number + 1} in {time.monotonic() - begun:.0f} s: {found}", flush=True)
            soak.left()
            print(found, *(dict(up.sessions.ends) for up in soak.ups), sep="\n")
    assert not found.wrong and not found.failed and not found.late, "a bystander was disturbed"
