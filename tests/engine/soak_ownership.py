"""As ``test_ownership.py`` for as many schedules as are asked for: ``python tests/engine/soak_ownership.py``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parent)]
from engine_fixtures import Lab, build, subject
from owned import Ordeal, Prefixes

from firsttoken.assets.shapes import shape_config

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    lab, known, seen = Lab(), subject(build(shape_config("tiny-2")), seed=1), Counter()
    prefixes = Prefixes(known.model)
    for seed in range(options.first, options.first + options.schedules):
        try:
            seen += Ordeal(lab, known, prefixes, seed).go()
        except Exception as error:
            seen["failed"] += 1
            print(f"schedule {seed}: {type(error).__name__}: {error}", flush=True)
    lab.close()
    print(f"{options.schedules} schedules: {dict(sorted(seen.items()))}")
    sys.exit(seen["failed"] > 0)
