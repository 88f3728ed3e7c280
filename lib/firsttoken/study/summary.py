"""What an experiment found, entry by entry: *what* was measured, and *where* it holds.

An entry is ``{measure, where: {key: value}, value, low, high, n, unit}``; no two of one summary have both measure and
where in common. Whoever writes one and whoever reads it, a claim, a figure, a page, name it in the same words, and the
keys of ``where`` are those of ``WHERE`` for every experiment, so that a thing has one name in all results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from firsttoken.study.errors import FirstTokenError
from firsttoken.study.parsing.parse_errors import shown
from firsttoken.study.parsing.schema import unknown
from firsttoken.study.stats import Statistic, bootstrap

if TYPE_CHECKING:
    import pandas

Scalar = str | int | float | bool
Entry = dict[str, Any]
Rows = list[dict[str, Any]]  # what an experiment observed, with units in the names of columns
Made = tuple[str, Statistic, str] | tuple[str, Statistic, str, float]  # a column, its statistic, unit and scale

WHERE = {
    "across": "one number for several entries that differ elsewhere: mean, median, p90, sum, worst, least, most",
    "than": "what the measure is a ratio or a difference to",
    "source": "how it was come by: live, measured, simulated, replayed, foreseen, published, table, arithmetic",
    "gbit_per_s": "rate of the link",
    "link": "a link by its name: a rate with what else it does, unshaped",
    "rtt_ms": "round trip to the other end",
    "machine": "a machine, a network or a device by its name",
    "model": "a model or its shape",
    "dtype": "what is computed or kept in",
    "bits": "of a weight",
    "variant": "one of several ways to do the same, by its name",
    "stage": "of a progressive model, 1 the first; 0 the model that never lacked a layer",
    "recipe": "how a stage was healed",
    "layers": "how many, or which as first-last",
    "policy": "what is done with a preempted request or an open session",
    "threshold_tokens": "up to how many a preempted request is swapped",
    "scheduler": "what makes the batch of a step",
    "budget_tokens": "most tokens of a step or a chunk",
    "objective": "the bound on a time, between tokens or of a request, that capacity keeps",
    "metric": "the time that an objective bounds: ttft, tbt, e2e",
    "costs": "the cost table that a replay stands on",
    "engine": "what computes: this engine, another, another library",
    "method": "how another model's cache is used",
    "share": "of the tokens of a prefix, those that are computed again",
    "bound_pct": "most of the own score that a chosen group loses, as a share of it",
    "bound_points": "the same in points of the score",
    "chosen_by": "what a group was chosen by: decoded answers, token accuracy",
    "signal": "what a gate before the answer looked at: of a withdrawn result alone",
    "receiver": "model that reuses a cache",
    "sender": "model whose cache is reused",
    "task": "the questions that are asked",
    "items": "how many questions a choice was made on",
    "chosen_on": "the task whose questions a choice was made on",
    "transitions": "contiguous runs of layers that are computed again",
    "context_tokens": "tokens before those that are measured",
    "tenant": "whose requests: light, heavy",
    "requests": "at once",
    "replicas": "that start together over one link: of a withdrawn result alone",
    "clients": "at once, each with one request after the other",
    "batch": "requests in a step",
    "servers": "of a chain or a swarm; 0 all blocks in one process",
    "audited": "share of a server's answers that a client audits",
    "case": "one of the situations that the experiment sets up, by its name",
}


class Summary(list[Entry]):
    """The entries of one result, in the order in which the experiment made them."""

    def add(self, measure: str, entry: Mapping[str, Any], /, **labels: Scalar) -> Entry:
        """Note ``entry`` (value, and where they exist low, high, n, unit, range) as ``measure`` where ``labels`` holds,
        and return it.

        Raises FirstTokenError for a key that ``WHERE`` has not, and for what is there already.
        """
        plain = _plain(labels)
        if fault := misnamed(plain):
            raise FirstTokenError(f"{measure}: {fault}")
        if self.get(measure, **plain) is not None:
            raise FirstTokenError(f"{named(measure, plain)} is there already")
        self.append({**_plain(entry), "measure": measure, "where": plain})
        return self[-1]

    def by(
        self, frame: pandas.DataFrame, keys: Mapping[str, str], measures: Mapping[str, Made], /, **labels: Scalar
    ) -> None:
        """Note each of ``measures`` for each group of the rows of ``frame`` that have the same ``keys``, in the order
        in which they first appear; where no row has a value, nothing.

        ``keys`` maps a key of ``WHERE`` to the column that its values stand in, {} for one group of all rows;
        ``measures`` maps a measure to what it is made of: a column, "mean" or "median" (or what else
        :func:`~firsttoken.study.stats.bootstrap` takes), the unit, and by what the column is multiplied where that is
        not 1.
        """
        if not len(frame):
            return
        groups = frame.groupby(list(keys.values()), sort=False) if keys else [((), frame)]
        for values, group in groups:
            group_labels = dict(zip(keys, values, strict=True))
            for measure, (column, statistic, unit, *scale) in measures.items():
                column_values = group[column].dropna().infer_objects()
                if len(column_values):
                    # the mean of booleans is a share
                    plain = column_values.to_numpy(bool if column_values.dtype == bool else float)
                    self.add(measure, bootstrap(plain, statistic).summary(unit, *scale), **group_labels, **labels)

    def get(self, measure: str, /, **labels: Scalar) -> Entry | None:
        """The entry of ``measure`` at exactly ``labels``, or None."""
        return next((entry for entry in self if entry["measure"] == measure and entry["where"] == labels), None)

    def of(self, measure: str, /, **labels: Scalar) -> Entry:
        """Return the entry that ``get`` finds. Raises FirstTokenError where there is none, naming what there is."""
        if (matching := self.get(measure, **labels)) is not None:
            return matching
        wanted, present = named(measure, labels), [named(entry["measure"], entry["where"]) for entry in self]
        raise FirstTokenError(f"no measure {wanted}; {unknown(wanted, get_close_matches(wanted, present, 6, 0))}")

    def value(self, measure: str, /, **labels: Scalar) -> Any:
        """Return the value of the entry that :meth:`of` finds."""
        return self.of(measure, **labels)["value"]

    def all(self, measure: str, /, **labels: Scalar) -> list[Entry]:
        """Every entry of ``measure`` whose place includes ``labels``, in order."""
        return [e for e in self if e["measure"] == measure and labels.items() <= e["where"].items()]


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with scalars of numpy as Python's."""
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in values.items()}


def named(measure: str, labels: Mapping[str, Scalar]) -> str:
    """An entry's name as a person reads it: "p99_tpot_ms (policy swap, requests 16)"."""
    return measure + (f" ({', '.join(f'{key} {value}' for key, value in labels.items())})" if labels else "")


def misnamed(labels: Mapping[str, Any]) -> str:
    """Return what is wrong with ``labels`` as a place, "" if nothing."""
    for key, value in labels.items():
        if key not in WHERE:
            return f"no place {key!r}; {unknown(key, get_close_matches(key, WHERE, n=3) or WHERE)}"
        if not isinstance(value, Scalar):
            return f"{key}: expected a number, yes or no, or text, not {shown(value)}"
    return ""


def misplaced(entries: Iterable[Entry]) -> str:
    """Return what is wrong with ``entries`` that a file holds as a summary, "" if nothing."""
    summary = Summary()
    try:
        for entry in entries:
            summary.add(entry["measure"], entry, **entry["where"])
    except (FirstTokenError, KeyError, TypeError) as error:
        return str(error)
    return ""
