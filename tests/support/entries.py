"""An entry of a summary in one call."""

from __future__ import annotations

from typing import Any


def entry(measure: str = "m", /, where: dict[str, Any] | None = None, **values: Any) -> dict[str, Any]:
    """{measure, where, ...} with ``values`` (value, low, high, n, unit, range) beside them."""
    return {"measure": measure, "where": where or {}} | values
