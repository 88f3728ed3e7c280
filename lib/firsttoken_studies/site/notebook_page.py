"""An executed notebook as one page without a network: equations as MathML, links between pages, figures with words."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from firsttoken.study.notebooks import notebook_title, read_notebook

_DISPLAY, _INLINE = re.compile(r"\$\$(.+?)\$\$", re.DOTALL), re.compile(r"(?<![\\$\w])\$([^$\n]+?)\$(?![\w$])")
_HEADING = re.compile(r"<(h[1-6])>(.*?)</\1>", re.DOTALL)
_LINK = re.compile(r'<a href="([^"#:]+)(#[^"]*)?"[^>]*>(.*?)</a>', re.DOTALL)
_CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.DOTALL)
_TIME = re.compile(r"\*\*Time\.\*\* ([^.(\n]+(?:\.\d+[^.(\n]*)*)")
_MARKS = re.compile(r"[*_`>#]|\[([^]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class NotebookPage:
    """A notebook for the index: ``finding`` is its first sentence or two, ``minutes`` as it states them."""

    path: Path
    number: str
    title: str
    finding: str
    minutes: str

    @property
    def name(self) -> str:
        """The file of its page."""
        return f"{self.path.stem}.html"


def described(path: Path) -> NotebookPage:
    """What the index says of the notebook at ``path``: the box at its head, else the sentence in bold behind it."""
    words = "\n".join(
        "".join(cell["source"]) for cell in read_notebook(path)["cells"][:2] if cell["cell_type"] == "markdown"
    )
    box = re.search(r"^> (?:\*\*[^*]+\*\* )?(.+)$", words, re.MULTILINE)
    claim = re.search(r"^\*\*[^*]+\*\* (.+)$", words, re.MULTILINE)
    told = box or claim
    minutes = _TIME.search(words)
    title = notebook_title(path).partition("·")[2].strip() or notebook_title(path)
    said = plain(told.group(1)) if told else ""
    return NotebookPage(path, path.name[:2], title, said, minutes.group(1).strip() if minutes else "")


def plain(markdown: str) -> str:
    """Text without the marks of markdown."""
    return " ".join(_MARKS.sub(lambda found: found.group(1) or "", markdown).split())


def body(path: Path) -> str:
    """The HTML of a notebook's cells, outputs included. Raises NotebookError for a file that cannot be read."""
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    content = deepcopy(read_notebook(path))
    said = notebook_title(path)
    for cell in content["cells"]:
        if cell["cell_type"] == "markdown":
            text = "".join(cell["source"])
            said = plain(_DISPLAY.sub("", text))[:300].replace('"', "'") or said
            cell["source"] = _with_equations(text)
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                output.setdefault("metadata", {}).setdefault("image/png", {})["alt"] = said
    exporter = HTMLExporter(template_name="basic", config=Config({"HTMLExporter": {"sanitize_html": False}}))
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = exporter.exclude_anchor_links = True
    made, _ = exporter.from_notebook_node(nbformat.reads(json.dumps(content), as_version=4))
    return _HEADING.sub(_with_name, made)


def _with_name(heading: re.Match[str]) -> str:
    """A heading that links lead to by its words, as JupyterLab names it: "#One-control:-the-link"."""
    level, words = heading.groups()
    return f'<{level} id="{quote(unescape(re.sub("<[^>]*>", "", words)).replace(" ", "-"))}">{words}</{level}>'


def _with_equations(text: str) -> str:
    """Markdown whose equations are MathML, but for what looks like one in code."""
    parts = _CODE.split(text)
    for at in range(0, len(parts), 2):
        shown = _DISPLAY.sub(lambda found: _mathml(found.group(1), "block"), parts[at])
        parts[at] = _INLINE.sub(lambda found: _mathml(found.group(1), "inline"), shown)
    return "".join(parts)


def _mathml(latex: str, display: str) -> str:
    from latex2mathml.converter import convert

    return convert(" ".join(latex.split()), display=display)


def with_links(html: str, pages: dict[str, str]) -> str:
    """``html`` whose relative links lead to other ``pages`` (by the name of their source), or are words without one."""

    def led(found: re.Match[str]) -> str:
        target, place, words = found.groups()
        page = pages.get(Path(target).name)
        return f'<a href="{page}{place or ""}">{words}</a>' if page else words

    return _LINK.sub(led, html)


def thumbnail(path: Path, figures: Path) -> Path | None:
    """The first figure of a notebook, as its name has it; None where it draws none."""
    found: list[Any] = []
    for cell in read_notebook(path)["cells"]:
        found += re.findall(r'plot\.save\(\w+, "([\w-]+)"', "".join(cell["source"]))
    there = (figures / f"{name}.png" for name in found)
    return next((figure for figure in there if figure.exists()), None)
