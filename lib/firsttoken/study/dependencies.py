"""Results that another experiment reads: this machine's, if they were measured under the settings that hold now."""

from __future__ import annotations

from typing import Any

from firsttoken.study.profile import Profile
from firsttoken.study.record import Result, load_result


def kept(experiment: str, profile: Profile) -> Result | None:
    """The result of ``experiment`` here under ``profile``, or None where it is not there or its settings were others.

    Raises FirstTokenError for one that cannot be read.
    """
    now: dict[str, Any] = {"model": profile.model, "dtype": profile.dtype_name, "threads": profile.threads}
    now |= profile.sections
    result = load_result(experiment, profile.name)
    if result is None or any(_differ(now[key], then) for key, then in result.parameters.items() if key in now):
        return None
    return result


def _differ(now: Any, then: Any) -> bool:
    """Whether a setting, or any key of a section, is another; a section's defaults are not in the profile."""
    if isinstance(then, dict):
        return any(then.get(key) != value for key, value in now.items())
    return now != then
