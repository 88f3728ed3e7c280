"""Clients of a server that grows, what they may hear, and files that are spoilt for a while."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plain_tokens import Plain, check_greedy, generated, judged
from transformers import AutoModelForCausalLM
from waiting import TIMEOUT_S

from firsttoken.engine.async_engine import Stream, TokenEvent
from firsttoken.progressiveserve.base_model import at_stage
from firsttoken.progressiveserve.loading.read_plan import adapter_blobs, part_blobs

PROMPT = [20, 31, 42, 53, 64]
MOVING = [PROMPT, PROMPT[:1], [7, 8, 9]]
OURS = ("firsttoken-engine", "loading", "placer", "reader-", "packing", "numpy", "reading")


def events_of(session: Stream, stage: int = 0) -> list[TokenEvent]:
    """All events, or what the session raises; one that never ends fails instead of hanging.

    With a ``stage``, until 20 tokens of it have come, when the client leaves: however long it took to arrive.
    """

    def read() -> list[TokenEvent]:
        events = []
        for event in session.events():
            events.append(event)
            if stage and sum(one.stage == stage for one in events) == 20:
                session.cancel()
        return events

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        try:
            return reading.result(TIMEOUT_S)
        except TimeoutError:
            session.end(RuntimeError("the session never ended"))
            raise


def tokens_of(session: Stream) -> list[int]:
    return [event.token_id for event in events_of(session)]


def greedy(folder: Path, prompt: list[int], count: int) -> Plain:
    """What stock transformers generates with the whole model."""
    return generated(AutoModelForCausalLM.from_pretrained(folder).eval(), prompt, count)


def check_stage(staged, stage: int, prompt: list[int], said: list[int], count: int) -> None:
    """Hold an answer of ``count`` tokens to what a stage says, by PEFT and without a cache."""
    with at_stage(staged.served, stage, staged.adapters.get(stage)) as model:
        assert check_greedy(said, judged(model, prompt, said)) == count


def bytes_until(staged, stage: int) -> int:
    """Bytes that move until ``stage`` is there."""
    folder, manifest = staged.folder, staged.manifest
    blobs = [b for k in range(1, stage + 1) for f in (part_blobs, adapter_blobs) for b in f(folder, manifest, [k])]
    return sum(blob.bytes for blob in blobs)


def part_path(staged, stage: int, index: int = -1) -> Path:
    return staged.folder / staged.manifest.stages[stage - 1].parts[index].file


class Spoilt:
    """A file with one byte changed, until it is mended."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, path.read_bytes()
        path.write_bytes(self.content[:-1] + bytes([self.content[-1] ^ 1]))

    def mend(self) -> None:
        self.path.write_bytes(self.content)


def first_event(session: Stream) -> TokenEvent:
    return next(session.events())
