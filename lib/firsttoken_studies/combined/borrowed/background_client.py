"""A client of a neighbour whose request never ends:

    python -m firsttoken_studies.combined.borrowed.background_client FOLDER ADDRESS

Says "running" after its first tokens, and when a line comes the times of all of them, on ``time.monotonic``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from firsttoken.engine.request import Sampling
from firsttoken.petals.remote_model import RemoteModel
from firsttoken_studies.probes.fast_exit import tell_and_end

PROMPT, TOKENS, WARM = 64, 1024, 8


def main(folder: Path, address: str) -> list[float]:
    """Send one request after another, until a line comes; return the times at which the steps ended."""
    ended = threading.Event()
    times: list[float] = []
    with RemoteModel(folder, [address]) as model:
        threading.Thread(target=lambda: (sys.stdin.readline(), ended.set()), daemon=True).start()
        while not ended.is_set():
            request = model.engine.submit(range(1, PROMPT + 1), Sampling(TOKENS))
            while not (request.finished or ended.is_set()):
                model.engine.step()
                times.append(time.monotonic())
                if len(times) == WARM:
                    print("running", flush=True)
            model.engine.cancel(request)
    return times


if __name__ == "__main__":
    tell_and_end(main(Path(sys.argv[1]), sys.argv[2]))
