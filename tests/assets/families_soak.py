"""Every decoder of transformers, tiny and random, through serve, stage and a swarm; run by hand.

    PYTHONPATH=lib:tests/support python tests/assets/families_soak.py [MODEL_TYPE ...]

Ends with 1 where one way in neither answered as transformers does nor ended with one line.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from families import architectures, examine, write_family


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counted, wrong, untried, begun = Counter[tuple[str, str]](), 0, 0, time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="families-"))
    try:
        for kind, name in architectures().items():
            if sys.argv[1:] and kind not in sys.argv[1:]:
                continue
            try:
                folder = write_family(kind, scratch / kind)
                outcomes = list(examine(folder))
            except Exception as error:
                print(f"{name:34} not made: {type(error).__name__}: {str(error).splitlines()[0][:90]}", flush=True)
                untried += 1
                continue
            for way, outcome in outcomes:
                verdict = "wrong" if outcome.wrong else "refused" if outcome.line else "equal"
                counted[way, verdict] += 1
                wrong += verdict == "wrong"
                line = (outcome.wrong or outcome.line).replace(str(folder), "FOLDER").replace("\n", " | ")
                print(f"{name:34} {way:6} {verdict:8} {line[:200]}", flush=True)
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for way in sorted({way for way, _ in counted}):
        print(f"{way:8}", *(f"{verdict} {counted[way, verdict]:4}" for verdict in ("equal", "refused", "wrong")))
    print(f"{untried} were not made; {wrong} wrong; {time.monotonic() - begun:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
