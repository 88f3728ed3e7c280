"""How methods and schedules are called and look in every figure of notebooks 30 to 36."""

from __future__ import annotations

from typing import NamedTuple

from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken_studies.record.plot import LOOKS


class Style(NamedTuple):
    """``label`` as a legend has it; ``colour`` as "#RRGGBB"; ``marker`` as matplotlib names it."""

    label: str
    colour: str
    marker: str


# The keys are the names of the methods in the rows; recomputing everything and full prefill are one thing and look
# alike, and so are pipelined and DroidSpeak.
METHODS: dict[str, Style] = {
    "full prefill": Style("full prefill (its own)", *LOOKS["recompute"]),
    "full reuse": Style("full reuse", *LOOKS["full reuse"]),
    "DroidSpeak": Style("DroidSpeak", *LOOKS["droidspeak"]),
    "CacheBlend": Style("CacheBlend", *LOOKS["cacheblend"]),
    "smaller model": Style("smaller model", *LOOKS["smaller model"]),
    "sender": Style("sender itself", *LOOKS["sender"]),
}
LOOK_OF = {
    Schedule.RECOMPUTE: "recompute",
    Schedule.SEND_ALL: "send all",
    Schedule.SEND_REUSED: "send reused",
    Schedule.PIPELINED: "droidspeak",
}
"""What each schedule is called in ``LOOKS``."""
SCHEDULES: dict[Schedule, Style] = {
    Schedule.RECOMPUTE: Style("recompute all (full prefill)", *LOOKS["recompute"]),
    Schedule.SEND_ALL: Style("send all", *LOOKS["send all"]),
    Schedule.SEND_REUSED: Style("send reused", *LOOKS["send reused"]),
    Schedule.PIPELINED: Style("pipelined (DroidSpeak)", *LOOKS["droidspeak"]),
}


def style_of(method: str) -> Style:
    """The style of a method by the beginning of its name: "CacheBlend 0.15 gradual" looks as CacheBlend does.

    Raises KeyError for a name that begins as no method does.
    """
    name = next((name for name in METHODS if method.startswith(name)), method)
    return METHODS[name]


MODELS = {"qa": "QA", "all": "all-task"}
"""The models of a pair in words, where the name of the adapter that makes one is none."""
TASKS = {"qa": "questions", "copy": "copying", "lead": "first sentences"}


def in_words(run: str) -> str:
    """A run's name, "qa <- base: qa", in words: who answers over whose cache, and what."""
    pair, _, task = run.partition(": ")
    receiver, sender = (MODELS.get(name, name) for name in pair.split(" <- "))
    return f"{receiver} model, {sender}'s cache: {TASKS.get(task, task)}"
