"""Numbers in the markdown of the notebooks: the program's, from a result, the papers', or stated with a reason."""

from __future__ import annotations

import re

import pytest
import yaml

from firsttoken.study import paths
from firsttoken_studies.record.notebooks import notebook_paths, read_notebook
from firsttoken_studies.record.pages import parts, templates

REFERENCES = re.compile(
    r"""```.*?``` | `[^`]*` | \]\([^)]*\) | \{\{.*?\}\} | ^\#.*?$  # code, links, what the program writes, headings
    | ^\*\*Time\.\*\*.*?(?:\.\s|$) | \b95\ %                       # the minutes of a reader, and intervals' level
    | \b(?:[Ff]igures?|[Tt]ables?|notebooks?|sections?|errata|App\.|report,|DroidSpeak|CPS)\s+I?[\d.]+
      (?:(?:,|\ and|\ to|;)\ I?[\d.]+)*
    | \(\d(?:\.\d+)+(?:(?:,|\ and)\ \d(?:\.\d+)+)*\)               # sections alone
    | [A-Za-z][\w-]*\d[\w.-]* | \d+-?(?:bit|B)\b                   # names: Llama-2-7B, P95, 4-bit, 70B
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
STATED = yaml.safe_load((paths.TEMPLATES / "stated.yaml").read_text(encoding="utf-8"))
NOTEBOOKS = {path.name[:2]: path for path in notebook_paths()}


def numbers_in(text: str) -> set[str]:
    return {found.rstrip(",").replace(",", "") for found in NUMBER.findall(REFERENCES.sub(" ", text))}


def of_the_papers(notebook: str) -> set[str]:
    """The numbers of the ledger's claims that the notebook answers, and of the papers' numbers that those judge."""
    files = paths.STUDIES.glob(f"nb{notebook}_*/claims.yaml")
    claims = [claim for path in files for claim in yaml.safe_load(path.read_text(encoding="utf-8"))]
    ids = {claim["id"] for claim in claims}
    said = [str(claim.get(key, "")) for claim in claims for key in ("says", "told", "value", "conditions")]
    published = yaml.safe_load((paths.DATA / "numbers.yaml").read_text(encoding="utf-8"))
    said += [number["says"] for number in published if ids & set(number.get("claims", ()))]
    return numbers_in(" ; ".join(said))


def by_hand(notebook: str) -> set[str]:
    """The numbers in markdown that nobody but its author put there."""
    cells = read_notebook(NOTEBOOKS[notebook])["cells"]
    template = templates().get(NOTEBOOKS[notebook])
    written = parts(template.read_text(encoding="utf-8")) if template else {}
    texts = [written.get(cell["id"], "".join(cell["source"])) for cell in cells if cell["cell_type"] == "markdown"]
    return set().union(*map(numbers_in, texts))


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_no_result_is_typed_into_markdown(notebook: str) -> None:
    stated = [str(number) for numbers in STATED.get(notebook, {}).values() for number in numbers]
    assert len(set(stated)) == len(stated)
    typed = by_hand(notebook) - of_the_papers(notebook)
    assert typed - set(stated) == set(), (
        "a result? put {{ value(...) }} into the page.md of its folder (see CONTRIBUTING)"
    )
    assert set(stated) - typed == set(), "in stated.yaml, and nowhere in the notebook"


def test_every_reason_is_for_a_notebook() -> None:
    assert set(STATED) <= set(NOTEBOOKS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("**P95** falls by 35 % [33, 36.5], 1,024 tokens", {"35", "33", "36.5", "1024"}),
        (
            "Figure 13 and 14 (3.4.2, 5.1), notebooks 30 to 35, errata I9, Llama-2-7B, `n = 5`, {{ n('a', 'b', 1) }}",
            set(),
        ),
        ("**Time.** 5 human minutes + 1.5 compute minutes (quick). It loses 3 points.", {"3"}),
    ],
)
def test_what_counts_as_a_number(text: str, found: set[str]) -> None:
    assert numbers_in(text) == found
