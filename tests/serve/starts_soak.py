"""Starts of `firsttoken serve` that something befalls at a random moment while clients ask; the suite runs a few.

    PYTHONPATH=lib:tests/support nice python tests/serve/starts_soak.py --number 1000 --seed 1

Ends with 1 where one of them was not right, as ``tests/support/starts.py`` says.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from starts import MISFORTUNES, draw, soak


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--number", type=int, default=1000)
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    begun, starts = time.monotonic(), soak(draw(asked.seed, asked.number))
    for misfortune in MISFORTUNES:
        of_it = [start for start in starts if start.misfortune == misfortune]
        ends = Counter(start.status for start in of_it)
        answers = sum((start.answers for start in of_it), Counter())
        wrong = sum(bool(start.fault) for start in of_it)
        print(f"{misfortune:10} {len(of_it):4} starts, {wrong} wrong; status {dict(ends)}; answers {dict(answers)}")
    wrong = sum(bool(start.fault) for start in starts)
    print(f"{len(starts)} starts of seed {asked.seed} in {time.monotonic() - begun:.0f} s, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
