"""Results that another experiment reads: this machine's, if they were measured under the settings that hold now."""

from __future__ import annotations

from firsttoken.study.profile import Profile
from firsttoken.study.record import Result, load_result


def kept(experiment: str, profile: Profile) -> Result | None:
    """The result of ``experiment`` here under ``profile``, or None where it is not there or its settings were others.

    Raises FirstTokenError for one that cannot be read.
    """
    result = load_result(experiment, profile.name)
    if result is None:
        return None
    now = {"model": profile.model, "dtype": profile.dtype_name, **profile.sections}
    asked = {name: value for name, value in result.parameters.items() if name in now}
    same = all(
        all(value.get(key) == wanted for key, wanted in now[name].items())
        if isinstance(value, dict)
        else value == now[name]
        for name, value in asked.items()
    )
    return result if same else None
