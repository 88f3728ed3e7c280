"""How methods and schedules look: one name, colour and marker for each, in every figure of notebooks 30 to 36."""

from __future__ import annotations

from typing import NamedTuple

from firsttoken.kvreuse.pipeline.schedule import Schedule


class Style(NamedTuple):
    """``label`` as a legend has it; ``colour`` as "#RRGGBB"; ``marker`` as matplotlib names it."""

    label: str
    colour: str
    marker: str


# From Tol's schemes: none is a colour of paper, measured, floor or a stage. The keys are the names of the methods in
# the rows; recomputing everything and full prefill are one thing and look alike, and so are pipelined and DroidSpeak.
METHODS: dict[str, Style] = {
    "full prefill": Style("full prefill (its own)", "#BB5566", "s"),
    "full reuse": Style("full reuse", "#DDAA33", "^"),
    "DroidSpeak": Style("DroidSpeak", "#004488", "o"),
    "CacheBlend": Style("CacheBlend", "#AA4499", "D"),
    "smaller model": Style("smaller model", "#663333", "v"),
    "sender": Style("sender itself", "#44BB99", "P"),
}
SCHEDULES: dict[Schedule, Style] = {
    Schedule.RECOMPUTE: Style("recompute all (full prefill)", "#BB5566", "s"),
    Schedule.SEND_ALL: Style("send all", "#997700", "^"),
    Schedule.SEND_REUSED: Style("send reused", "#6699CC", "v"),
    Schedule.PIPELINED: Style("pipelined (DroidSpeak)", "#004488", "o"),
}


def style_of(method: str) -> Style:
    """The style of a method by the beginning of its name: "CacheBlend 0.15 gradual" looks as CacheBlend does.

    Raises KeyError for a name that begins as no method does.
    """
    name = next((name for name in METHODS if method.startswith(name)), method)
    return METHODS[name]
