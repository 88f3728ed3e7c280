"""A process that has told its answer is gone, whatever is left to be taken down."""

from __future__ import annotations

import subprocess
import sys

SOURCE = """
import atexit, threading, time
from firsttoken_studies.probes.fast_exit import tell_and_end
atexit.register(lambda: print("the interpreter's own end"))
threading.Thread(target=time.sleep, args=(600,)).start()  # the interpreter would wait for it
print("before")
tell_and_end({"tokens": [1, 2]})
"""


def test_an_answer_is_told_whole_and_nothing_waits() -> None:
    ended = subprocess.run([sys.executable, "-c", SOURCE], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, 'before\n{"tokens": [1, 2]}\n', "")
