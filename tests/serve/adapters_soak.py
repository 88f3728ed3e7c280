"""A folder of each kind of adapter, held to PEFT; run by hand.

    PYTHONPATH=lib:tests/support python tests/serve/adapters_soak.py [KIND ...]

Ends with 1 where a folder is answered otherwise than by PEFT, or refused by more than one line.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from fine_tunes import SHAPE
from peft_kinds import KINDS, examine, write
from transformers import AutoModelForCausalLM


def main(kinds: list[str]) -> int:
    torch.manual_seed(0)
    base, counted = AutoModelForCausalLM.from_config(SHAPE).eval(), Counter[str]()
    with tempfile.TemporaryDirectory() as scratch:
        for kind in kinds or KINDS:
            if not write(kind, base, Path(scratch) / "a"):
                outcome = "not made by this PEFT"
            else:
                result = examine(base, Path(scratch) / "a")
                outcome = "WRONG" if result.wrong else "refused" if result.line else "equal"
                line = result.wrong or result.line
            counted[outcome] += 1
            print(f"{kind:30} {outcome:22} {line if outcome in ('WRONG', 'refused') else ''}")
    print(*(f"{outcome} {times}" for outcome, times in counted.items()), sep=", ")
    return bool(counted["WRONG"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
