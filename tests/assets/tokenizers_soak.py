"""Tokenizer settings drawn from a seed, each held to transformers' ids and text; run by hand.

    PYTHONPATH=lib:tests/support python tests/assets/tokenizers_soak.py --number 300 --seed 1

Ends with 1 where a folder reads otherwise than by transformers, or ended with anything but one line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tokenizer_settings import draw, examine, write

_NAMES = re.compile(r"/\S+|'[^']*'|\d[\d,]*|\[[^\]]*\]")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    counted, reasons, lean, began = Counter[str](), Counter[str](), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenizers-") as scratch:
        for index, drawn in enumerate(draw(options.seed, options.number)):
            with contextlib.redirect_stderr(io.StringIO()) as terminal:
                outcome, line = examine(write(drawn, Path(scratch) / f"{index}"))
            counted[outcome] += 1
            lean += outcome == "equal" and not terminal.getvalue()
            if outcome == "refused":
                reasons[_NAMES.sub("...", line)[:110]] += 1
            elif outcome == "wrong":
                print(f"WRONG {index} {drawn}: {line}")
    for reason, times in reasons.most_common():
        print(f"{times:5}  {reason}")
    print(*(f"{outcome} {times}," for outcome, times in sorted(counted.items())), f"{lean} of them without a line,")
    print(f"{options.number} of seed {options.seed} in {time.monotonic() - began:.0f} s")
    return bool(counted["wrong"])


if __name__ == "__main__":
    sys.exit(main())
