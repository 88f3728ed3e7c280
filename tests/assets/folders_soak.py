"""Folders drawn from a seed, each through serve, stage, measure and swarm, held to transformers; run by hand.

    PYTHONPATH=lib:tests/support python tests/assets/folders_soak.py --number 300 --seed 1

``--waiting`` draws LongRoPE, named and tagged templates and ends that only the tokenizer names, too. Ends with 1 where
one way in answered otherwise than transformers, ended with anything but one line, or refused a folder that is sound.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from folders import Outcome, draw, examine, write

_NAMES = re.compile(r"/\S+|'[^']*'|\d[\d,]*|\[[^\]]*\]|\S+\.(weight|bias)")


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--number", type=int, default=300)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--waiting", action="store_true")
    told = options.parse_args()
    torch.set_num_threads(1)
    counted, reasons, wrong, begun = Counter[tuple[str, str]](), Counter[str](), [], time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="folders-"))
    try:
        for index, drawn in enumerate(draw(told.seed, told.number, told.waiting)):
            folder = write(drawn, scratch / f"{index}" / "m", seed=index)
            for way, outcome in examine(drawn, folder):
                kind = "wrong" if outcome.wrong else "refused" if outcome.line else "equal"
                counted[way, kind] += 1
                reasons[_reason(outcome)] += kind == "refused"
                if outcome.wrong:
                    wrong.append(f"{index} {way}: {drawn}: {outcome.wrong}")
            shutil.rmtree(scratch / f"{index}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for way in sorted({way for way, _ in counted}):
        print(f"{way:8}", *(f"{kind} {counted[way, kind]:4}" for kind in ("equal", "refused", "wrong")))
    for reason, times in reasons.most_common():
        print(f"{times:5}  {reason}" if times else "", end="\n" if times else "")
    for line in wrong:
        print("WRONG", line)
    print(f"{told.number} folders of seed {told.seed} in {time.monotonic() - begun:.0f} s, {len(wrong)} wrong")
    return bool(wrong)


def _reason(outcome: Outcome) -> str:
    """The line without what is of this folder alone."""
    return _NAMES.sub("...", outcome.line)[:110]


if __name__ == "__main__":
    sys.exit(main())
