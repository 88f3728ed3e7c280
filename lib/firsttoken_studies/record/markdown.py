"""Tables of markdown."""

from collections.abc import Iterable, Mapping, Sequence


def table(columns: Mapping[str, Sequence[str]]) -> str:
    """Columns by their heads; every cell in one line."""
    lines = [_row(columns), _row(["---"] * len(columns)), *map(_row, zip(*columns.values(), strict=True))]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(" ".join(str(cell).replace("|", "\\|").split()) for cell in cells) + " |"
