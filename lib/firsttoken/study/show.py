"""What every notebook begins with and how it shows numbers: thin helpers over pandas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from firsttoken.study import plot
from firsttoken.study.machine import describe
from firsttoken.study.profile import Profile, load_profile
from firsttoken.study.record import Result
from firsttoken.study.system import NOT_HERE

if TYPE_CHECKING:
    import pandas


def opening(name: str) -> Profile:
    """Set the style of figures and tables, print machine and versions, and return the profile.

    Raises ProfileError if it is unknown.
    """
    import pandas

    plot.style()
    # what pandas has in a notebook; imported before there is one, as in a warm kernel, it cuts to the terminal's width
    pandas.set_option("display.max_columns", 20)
    machine = describe()
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else f"memory {NOT_HERE}"
    where = machine["gpu"] or machine["cpu"]
    print(f"machine   {machine['slug']}: {where}, {machine['cores']} cores, {memory}, Python {machine['python']}")
    print("packages  " + ", ".join(f"{name} {version}" for name, version in machine["packages"].items()))
    profile = load_profile(name)
    print(
        f"profile   {profile.name}: {profile.about}; model {profile.model}, {profile.dtype_name}, seed {profile.seed}"
    )
    return profile


def where(result: Result | None) -> str:
    """One line that says where a result comes from, for captions: machine, profile, dtype, date, seconds."""
    if result is None:
        return "not recorded: run `firsttoken measure` (see the README)"
    computed = f"profile {result.profile}, {result.parameters.get('dtype', 'no dtype')}"
    return f"{result.slug}, {computed}, {result.started[:10]}, {result.duration_s:.0f} s"


def interval(entry: Mapping[str, Any] | None, digits: int = 1) -> str:
    """ "12.3 [11.0, 13.9]" of a summary entry, the plain value where it has no interval, "" for none."""
    if entry is None:
        return ""
    value = entry["value"]
    if isinstance(value, bool | str) or "low" not in entry:
        return str(value)
    return f"{value:.{digits}f} [{entry['low']:.{digits}f}, {entry['high']:.{digits}f}]"


def table(rows: Iterable[Mapping[str, Any]], index: str) -> pandas.DataFrame:
    """Rows as a table with ``index`` first; what is absent stays an empty cell."""
    import pandas

    return pandas.DataFrame(list(rows)).set_index(index).astype(object).fillna("")
