"""An engine that has served many requests holds no more than after a few, and the benchmark's measures are of it."""

from __future__ import annotations

import gc
import tracemalloc

from engine_soak import bookkeeping, soak

from firsttoken.assets.models import load_model
from firsttoken.engine.request import Request

MORE = 96  # requests
GROWTH_BYTES = 256 * MORE  # one that is kept holds 1 KiB and more


def grown(requests: list[Request], model) -> int:
    """Bytes of Python objects by which it grew from the 96th to the 192nd request; ``requests`` keeps what it gets."""
    sizes = []
    tracemalloc.start()
    try:
        for over in soak(model, 2 * MORE):
            if over in (MORE, 2 * MORE):
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert over == 2 * MORE
    return sizes[1] - sizes[0]


def test_memory_is_flat_over_requests_of_which_many_are_cancelled(monkeypatch) -> None:
    model = load_model("random:tiny", with_tokenizer=False).model
    assert grown([], model) < GROWTH_BYTES
    kept, append = [], Request.__init__

    def remembered(request: Request, *args, **options) -> None:
        append(request, *args, **options)
        kept.append(request)

    monkeypatch.setattr(Request, "__init__", remembered)  # the control: somebody who forgets none of them
    assert grown(kept, model) > GROWTH_BYTES


def test_the_share_outside_the_executor_is_one_of_every_step() -> None:
    model = load_model("random:tiny", with_tokenizer=False).model
    shares = bookkeeping(model, 4)
    assert len(shares) == 40 and all(0 < share < 1 for share in shares)
