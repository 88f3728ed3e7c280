"""What every notebook begins with, and how it shows numbers, mechanisms and what holds: thin helpers."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError, MechanismError
from firsttoken.study.machine import describe
from firsttoken.study.parsing.yaml_text import read_yaml
from firsttoken.study.profile import Profile, load_profile
from firsttoken.study.progress import kernel
from firsttoken.study.summary import Scalar, Summary
from firsttoken.study.system import NOT_HERE
from firsttoken_studies.record import plot
from firsttoken_studies.record.results import CHANGED, Result

if TYPE_CHECKING:
    import pandas
    from IPython.display import Code


Direction: TypeAlias = bool | tuple[bool, str]  # whether it holds; what was expected and seen, for where it does not


def tell_causes() -> None:
    """End a later cell that lacks a name with the error of the cell that failed before it, or with advice."""
    shell, shown_cause = kernel(), ""  # of the first cell that failed

    def after(result: Any) -> None:
        nonlocal shown_cause
        error = result.error_before_exec or result.error_in_exec
        if isinstance(error, NameError) and shown_cause:
            print(f"An earlier cell failed, and this one lacks what it defines. {shown_cause}")
        elif isinstance(error, NameError):
            print("If a cell above this one defines it, run that first: Run > Run All Above Selected Cell.")
        elif error is not None and not shown_cause:
            shown_cause = f"{type(error).__name__}: {error}"

    if shell is not None and not hasattr(shell, "firsttoken_causes"):
        shell.firsttoken_causes = after
        shell.events.register("post_run_cell", after)


def header(name: str, changes: Mapping[str, Any] | None = None) -> Profile:
    """Set the style of figures and tables, print machine and versions, and return the profile ``name``.

    ``changes`` maps settings of the profile, such as "replayed.blocks", to what the reader has them be; None leaves a
    setting as the profile has it. Results of a changed profile are kept beside those of the unchanged one.

    Raises ProfileError if the profile or a setting is unknown.
    """
    import pandas

    tell_causes()
    plot.style()
    # what pandas has in a notebook; imported before there is one, as in a warm kernel, it cuts to the terminal's width
    pandas.set_option("display.max_columns", 20)
    machine = describe()
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else f"memory {NOT_HERE}"
    processor = machine["gpu"] or machine["cpu"]
    print(f"machine   {machine['slug']}: {processor}, {machine['cores']} cores, {memory}, Python {machine['python']}")
    print("packages  " + ", ".join(f"{name} {version}" for name, version in machine["packages"].items()))
    changed = {key: value for key, value in (changes or {}).items() if value is not None}
    profile = load_profile(name, **changed)
    if changed:
        profile = replace(profile, name=name + CHANGED)
    print(
        f"profile   {profile.name}: {profile.about}; model {profile.model}, {profile.dtype_name}, seed {profile.seed}"
    )
    for key, value in changed.items():
        print(f"changed   {key} = {value}")
    if lacking := _missing():
        print(f"missing   {', '.join(lacking)}: run `firsttoken fetch` first, which shows sizes and resumes")
    return profile


def _missing() -> list[str]:
    """The pinned assets of which the cache lacks a file."""
    folder = paths.CACHE / "assets"
    return [
        asset["name"]
        for asset in read_yaml(paths.ENV / "assets.yaml")
        if not all((folder / member["saved_as"]).exists() for member in asset["members"])
    ]


def source(*things: Any) -> Code:
    """The library's own source of functions, methods or classes, without their docstrings, to be shown in a cell."""
    from IPython.display import Code

    return Code("\n\n".join(map(_source, things)), language="python")


def _source(thing: Any) -> str:
    text = textwrap.dedent(inspect.getsource(thing))
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            first = node.body[0]
            lines[first.lineno - 1 : first.end_lineno] = [None] * (first.end_lineno - first.lineno + 1)
    return re.sub(r"(:\n)\n+", r"\1", "\n".join(line for line in lines if line is not None))


@contextmanager
def attempt(mechanism: str) -> Iterator[None]:
    """Around a scene: whatever a ``mechanism`` that the reader has changed does wrong is told in one line.

    Raises MechanismError for any exception of the block.
    """
    try:
        yield
    except FirstTokenError as error:
        raise MechanismError(f"{mechanism}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or "no reason given"
        raise MechanismError(f"{mechanism} does not work as it stands: {type(error).__name__}: {reason}") from None


def check(mechanism: str, library: Mapping[str, bool] | None = None, **directions: bool | tuple[bool, str]) -> None:
    """Say of each direction, a name with underscores for spaces, whether it holds in this run.

    ``mechanism`` names what is judged, and its cell. ``library`` has the same directions of the library's run beside
    it, of which a last line says whether they hold: so a reader sees whose run a red line is about.

    Raises MechanismError, which names the ``mechanism``, where one does not hold; all are printed first.
    """
    wrong = []
    for name, direction in directions.items():
        holds, observed = _holds_and_seen(direction)
        line = name.replace("_", " ") + (f" ({observed})" if observed and not holds else "")
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {line}")
        if not holds:
            wrong.append(line)
    if library is not None:
        other = [name.replace("_", " ") for name, direction in library.items() if not _holds_and_seen(direction)[0]]
        print(f"the library's: DOES NOT HOLD: {'; '.join(other)}" if other else "the library's: all of this holds")
        if other and not wrong:
            raise MechanismError(
                f"the library's, beside {mechanism}, does not do what it is there for: {'; '.join(other)}"
            )
    if wrong:
        raise MechanismError(f"{mechanism} does not do in this run what it is there for: {'; '.join(wrong)}")


def _holds_and_seen(direction: Direction) -> tuple[bool, str]:
    return direction if isinstance(direction, tuple) else (direction, "")


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


def cells(summary: Summary, columns: Mapping[str, Sequence[Any]], **labels: Scalar) -> dict[str, str]:
    """The cells of one line of a table, by their heads: the interval of a measure where ``labels`` says, "" for none.

    A column is (measure, digits), with the rest of the place behind them where ``labels`` is not all of it.
    """
    return {
        head: interval(summary.get(measure, **labels, **dict(*rest)), digits)
        for head, (measure, digits, *rest) in columns.items()
    }


def table(rows: Iterable[Mapping[str, Any]], index: str) -> pandas.DataFrame:
    """Rows as a table with ``index`` first; what is absent stays an empty cell. No rows give a table without any."""
    import pandas

    frame = pandas.DataFrame(list(rows))
    return frame.set_index(index).astype(object).fillna("") if len(frame) else pandas.DataFrame(columns=[index])
