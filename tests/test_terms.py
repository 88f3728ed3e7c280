"""No term of the field stands on a page before it is explained or linked.

The rule, for the README and for every notebook, in the order in which the markdown is read. Headings, equations and
code are left out. A *passage* is a paragraph, an item of a list, or a row of a table. Where a term of ``TERMS`` first
stands,

1. its passage explains it: it holds one of the phrases that ``TERMS`` has for it ("time to the first token" for TTFT),
   or it sets the term in italics or bold and goes on with ``is``, ``are``, ``means``, ``holds``, or ``a``, ``the`` or
   ``which`` after a comma; or
2. the term is the text of a link, or a part of it, to the table of words (``[TTFT](01_the_first_token.ipynb#Words)``)
   or to another notebook.

A notebook explains at least two of its terms itself. In the README one link to the table, before the first term, is
enough. Who explains a term in other words adds the phrase to ``TERMS``; who uses a new term adds it, and a row to the
table "Words" of notebook 01.

Every notebook but 00, 01 and 90 ends its first cell with one line that leads to the library's file of its mechanism and
to the notebooks before and after it (one line in the cell, too):

    **In the library:** [`lib/F.py`](../lib/F.py). **Before this:** [notebook NN](NN_X.ipynb). **Next:**
    [notebook MM](MM_Y.ipynb).

Several links of a kind are set apart by commas and "and". The notebook imports the file's module, or imports the
package and uses the module's name or a name that it defines; one without a cell `mechanism` runs or shows an experiment
that imports it.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from the_library import LIB, behind, module_of, named, sources

from firsttoken.study import paths
from firsttoken_studies.record.notebooks import notebook_paths, read_notebook
from firsttoken_studies.registry import EXPERIMENTS

NOTEBOOKS = notebook_paths()
WORDS = next(path for path in NOTEBOOKS if path.name.startswith("01_"))
PROGRESSIVE, CPS, SARATHI, PETALS = r"1\d|04|56|60|README", r"2\d|03|README", r"4\d|02|60|README", r"5[0234]|06"


@dataclass(frozen=True)
class Term:
    """A term as the table of words has it: how it is ``seen``, and phrases of which one explains it.

    ``on`` are the pages, by the first two figures of their names, on which the word is the term."""

    name: str
    seen: str
    explained: str
    on: str = r"\d\d|README"


TERMS = (
    Term("adapter, LoRA", r"adapters?|LoRA", r"thin (?:matrices|ones)|small matrices"),
    Term("angular distance", r"angular distances?", r"the angle"),
    Term("block of layers on a server", r"blocks?", r"block\W* is (?:one|a) layer|neighbouring layers", PETALS),
    Term("bootstrap interval", r"bootstrap", r"drawn again"),
    Term("bubble", r"bubbles?", r"leave the other device idle|device (?:is idle|waits)"),
    Term("chunk", r"chunk(?:s|ed)?", r"(?:parts?|pieces) of (?:a|the) prompt|cut into chunks"),
    Term("cold start", r"cold starts?", r"nothing of the (?:weights|model) is in memory|meets? cold files"),
    Term("compute-bound", r"compute-bound", r"arithmetic (?:is|limits)|rate of arithmetic|above it the arithmetic"),
    Term("contiguous group", r"contiguous group", r"without (?:a )?gaps?|neighbouring layers|consecutive layers"),
    Term("cross-point", r"cross-point", r"cost (?:nearly )?the same|costs? cross|is the cheaper way"),
    Term("decode", r"decodes?(?! them| and)|decoding", r"one more token|one token a step|further token"),
    Term("decoded answer", r"decoded (?:answers?|score|F1)", r"token by token|its own earlier tokens"),
    Term("E-cache", r"E-caches?", r"hidden states (?:that|which) enter"),
    Term("exact match, EM", r"exact match|EM", r"equals? the expected|word for word"),
    Term("F1", r"F1", r"overlap of"),
    Term("floor", r"floors?", r"physics allow|no program is faster|least time|can be faster|no loader can"),
    Term("full reuse", r"full reuse", r"whole (?:KV )?cache"),
    Term("goodput", r"goodput", r"keep every limit"),
    Term("greedy", r"greedy", r"likeliest"),
    Term("head-of-line blocking", r"head-of-line", r"nobody behind it|behind it wait"),
    Term("healing", r"healed|healing|heals?|unhealed", r"adapters?[^.]* (?:answers? well|repair|stand in)|repaired by"),
    Term("hidden state", r"hidden states?", r"vectors?[^.]* for (?:a|each) token|one vector (?:a|per) token"),
    Term("hybrid batch", r"hybrid batch(?:es)?", r"together|whole prompts|beside|with decodes"),
    Term("KV block", r"KV blocks?|blocks of \d+ tokens", r"fixed number of tokens|for \d+ tokens each"),
    Term("KV cache", r"KV caches?", r"keys and values|a \*key\* and a \*value\*"),
    Term("LIFO", r"LIFO", r"last in, first out|last to come|came last"),
    Term("memory-bound", r"memory-bound", r"the memory is the limit"),
    Term("objective, SLO", r"objectives?|SLOs?", r"limits? on|bounds"),
    Term("offloading", r"offload\w*", r"anew|host memory|on a disk|brings all weights"),
    Term("P50, P95, P99", r"P(?:50|95|99)", r"of 100|stay below|percentile"),
    Term("Pareto frontier", r"Pareto|frontiers?", r"no other (?:one|group)|fewest layers for"),
    Term("partial prefill", r"partial prefill", r"only (?:some|the|a group)[^.]*layers|computes some"),
    Term("PassLayer", r"PassLayers?", r"stands in (?:its|the) place|hands (?:the residual stream|on)"),
    Term("perplexity", r"perplexit(?:y|ies)", r"surprised"),
    Term("preempted", r"preempt\w*", r"memory[^.]* full|gives up its|block is missing|loses? its "),
    Term("prefill", r"prefill\w*", r"(?:reads?|runs?|over|through|of) (?:a|the|its) (?:whole )?prompt|prompt at once"),
    Term("prefill first", r"prefill[- ]first", r"whole|puts (?:each )?prefills? first|prompts alone"),
    Term("quantised, 8 bits", r"quantis\w+|dequantis\w+|8 bits", r"whole numbers?"),
    Term("receiver", r"receivers?", r"can answer over|model that answers over|answer over the cache"),
    Term(
        "recompute", r"recomput\w*", r"(?:processes|computes?|computing|prefills?) [^.]*(?:tokens|them|it) again", CPS
    ),
    Term("replayed", r"replay(?:s|ed)?", r"cost model in place|without a model|on (?:the )?published costs", CPS),
    Term("residual stream", r"residual stream", r"handed from layer to layer"),
    Term("roofline", r"rooflines?", r"for each byte"),
    Term("sender", r"senders?", r"cache of another model|another model, the|model that (?:computed|wrote) it"),
    Term("serving capacity", r"capacit(?:y|ies)(?! of)", r"highest rate|how many requests a second", SARATHI),
    Term("shaped link", r"shaped", r"token bucket|held (?:down|back)|rate is set"),
    Term("simulated", r"simulat\w+", r"on (?:measured|profiled|published) costs|cost model in place|no model"),
    Term("stage", r"stages?", r"lacks?|missing layers|leaves? layers out", PROGRESSIVE),
    Term("swap", r"swap(?:s|ped|ping)?", r"host memory", CPS),
    Term("TBT", r"TBT|ITL", r"time between"),
    Term("teacher forcing", r"teacher.forc\w+", r"given (?:the|so far)"),
    Term("throughput", r"throughput", r"(?:tokens|requests)[^.]* a second"),
    Term("token accuracy", r"token accuracy", r"share of the (?:expected )?answer's tokens|tokens[^.]* given the ones"),
    Term("token budget", r"budgets?", r"tokens (?:of|in|that) (?:a|one) step|tokens a step|most tokens", SARATHI),
    Term("token bucket", r"token buckets?", r"lets bytes pass|holds [^.]*reads back"),
    Term("TPOT", r"TPOT", r"time (?:per|for each) (?:output|further) token|mean time between"),
    Term("TTFT", r"TTFT", r"time (?:until|to) (?:the|a|its) first token|arrival to (?:the|its) first token"),
    Term("victim", r"victims?", r"gives up its|is preempted|last to come"),
    Term("warm-up", r"warm-up", r"not counted"),
    Term("watermark", r"watermark", r"kept free|stays? free"),
)

_LEFT_OUT = re.compile(
    r"```.*?```|\$\$.*?\$\$|(?<![\\$\w])\$[^$\n]+\$(?![\w$])|<!--.*?-->|^#.*?$|!\[[^]]*\]\([^)]*\)",
    re.DOTALL | re.MULTILINE,
)
_CODE = re.compile(r"`([^`]*)`")
_LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")
_TO_WORDS = re.compile(r"(?:notebooks/)?01_the_first_token\.ipynb#Words$|#Words$")
_TO_NOTEBOOK = re.compile(r"(?:notebooks/)?\d\d_\w+\.ipynb(?:#.*)?$")


def passages(markdown: str) -> list[str]:
    """Paragraphs, items of lists and rows of tables, without what is no prose; code of one word is a name."""
    kept = _CODE.sub(lambda code: code[1] if code[1].isalpha() else "", _LEFT_OUT.sub("", markdown))
    return [one for one in re.split(r"\n\s*\n|\n(?=[-*|] ?)", kept) if one.strip()]


def pages() -> dict[str, list[str]]:
    """The passages of the README and of every notebook, by the name of its file."""
    found = {"README.md": passages((paths.ROOT / "README.md").read_text(encoding="utf-8"))}
    for path in NOTEBOOKS:
        found[path.name] = [one for cell in markdown_of(path) for one in passages(cell.partition("\n## Words\n")[0])]
    return found


def markdown_of(path: Path) -> list[str]:
    """The markdown cells of a notebook in their order."""
    return ["".join(cell["source"]) for cell in read_notebook(path)["cells"] if cell["cell_type"] == "markdown"]


def first_of(term: Term, said: list[str]) -> tuple[str, re.Match[str]] | None:
    """The passage in which a term first stands, and where in it; None where it does not."""
    seen = re.compile(rf"(?<![\w-])(?:{term.seen})(?![\w-])", re.IGNORECASE if term.name.islower() else 0)
    for passage in said:
        for found in seen.finditer(passage):
            if not any(link.start(2) <= found.start() < link.end(2) for link in _LINK.finditer(passage)):
                return passage, found
    return None


def is_explained(term: Term, passage: str) -> bool:
    """Whether the passage holds a phrase of the term, or sets it apart and goes on to say what it is."""
    set_apart = rf"(\*{{1,2}})[^*]*\b(?:{term.seen})\b[^*]*\1(?:, (?:an?|the|which)| is| are| means| holds)\s"
    text = _LINK.sub(r"\1", passage).replace("\n", " ")
    return re.search(f"{term.explained}|{set_apart}", text, re.IGNORECASE) is not None


def is_linked(passage: str, at: int) -> bool:
    """Whether what stands there is the text of a link to the words or to a notebook."""
    links = (link for link in _LINK.finditer(passage) if link.start(1) <= at < link.end(1))
    return any(_TO_WORDS.match(link[2]) or _TO_NOTEBOOK.match(link[2]) for link in links)


def leads_to_words(said: list[str]) -> bool:
    """Whether a page has a link to the words before any term."""
    for passage in said:
        links = [link.start() for link in _LINK.finditer(passage) if _TO_WORDS.match(link[2])]
        first = [found[1].start() for term in TERMS if (found := first_of(term, [passage]))]
        if links or first:
            return bool(links) and (not first or min(links) < min(first))
    return False


def bare(name: str, said: list[str]) -> list[str]:
    """The terms of a page that first stand neither explained nor linked, each with the words around it."""
    complaints, explained, met = list[str](), 0, 0
    led = name == "README.md" and leads_to_words(said)
    for term in TERMS:
        found = first_of(term, said) if re.match(term.on, name) else None
        if found is None:
            continue
        passage, place = found
        met += 1
        explained += is_explained(term, passage)
        if not (is_explained(term, passage) or is_linked(passage, place.start()) or led):
            around = passage[max(0, place.start() - 60) : place.end() + 60].replace("\n", " ")
            complaints.append(f"{term.name}: ...{around}...")
    if name != "README.md" and explained < min(2, met):
        complaints.append(f"{explained} terms are explained on the page itself")
    return complaints


@pytest.mark.parametrize(("name", "said"), pages().items(), ids=pages())
def test_no_term_stands_before_it_is_explained_or_linked(name: str, said: list[str]) -> None:
    assert bare(name, said) == []


def page(*said: str) -> list[str]:
    """A notebook that explains two terms and goes on."""
    return ["The *TTFT* is the time to the first token, and *F1* is the overlap of words.", *said]


@pytest.mark.parametrize(
    "said",
    [
        "The KV cache holds the keys and values of all tokens.",
        "The *watermark* is off; a *victim* is whoever comes last.",
        "The [E-cache](01_the_first_token.ipynb#Words) and the [bubbles](41_serving_capacity.ipynb) grow.",
        "# Swap\n\nThe `E-cache` of $swap$, ![preempted](victim.png)",
        "Two cores decode them; an adapted re-chunker.",
    ],
)
def test_a_term_that_is_explained_or_linked_passes(said: str) -> None:
    assert bare("22_x.ipynb", page(*passages(said))) == []


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ("The E-cache grows.", ["E-cache"]),
        ("The `PassLayer` is heard of.", ["PassLayer"]),
        ("| a | the victims |\n| b | whose KV cache is lost |", ["KV cache", "victim"]),
        ("Its KV cache is lost.\n\nThe KV cache holds the keys and values of all tokens.", ["KV cache"]),
        ("See the [words](01_the_first_token.ipynb#Words) of the watermark.", ["watermark"]),
        ("The [watermark](https://example.org) is off.", ["watermark"]),
    ],
)
def test_a_term_that_stands_bare_is_named(said: str, names: list[str]) -> None:
    assert [one.partition(":")[0] for one in bare("22_x.ipynb", page(*passages(said)))] == names


def test_a_notebook_explains_two_terms_itself() -> None:
    links = passages("[TTFT](01_the_first_token.ipynb#Words), [F1](01_the_first_token.ipynb#Words)")
    assert bare("22_x.ipynb", links) == ["0 terms are explained on the page itself"]


def test_the_readme_leads_to_the_words_before_the_first_term() -> None:
    link = "[Notebook 01](notebooks/01_the_first_token.ipynb#Words) explains the words."
    assert bare("README.md", [link, "TTFT"]) == bare("README.md", [f"{link} TTFT"]) == []
    assert len(bare("README.md", ["TTFT", link])) == len(bare("README.md", [f"TTFT. {link}"])) == 1


def test_the_table_of_words_explains_each_term_in_a_sentence() -> None:
    (cell,) = (cell for cell in markdown_of(WORDS) if "\n## Words\n" in cell)
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", cell.partition("\n## Words\n")[2], re.MULTILINE)
    (head, *words), sentences = zip(*rows, strict=True)
    assert head == "word" and words == sorted(words, key=str.lower)
    assert {term.name for term in TERMS} == set(words)
    assert [one for one in sentences[1:] if not re.fullmatch(r"[A-Z]\w*(?:-\w+)* .{20,}\.", one)] == []


def is_used(module: str, path: Path) -> bool:
    """Whether the code of a notebook, or of an experiment where it has no cell `mechanism`, uses a module."""
    cells = [cell for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    if not any("mechanism" in cell["metadata"].get("tags", ()) for cell in cells):
        shown = re.findall(r"(?:run_experiment|load_result)\(\s*\"(\w+)\"", code)
        return any(module in behind(EXPERIMENTS[name].module) for name in shown)
    there = {one if one in sources() else one.rpartition(".")[0] for one in named(code)}
    package, _, name = module.rpartition(".")
    defined = {
        one.name for one in ast.parse(sources()[module]).body if isinstance(one, (ast.ClassDef, ast.FunctionDef))
    }
    return module in there or (package in there and bool((defined | {name}) & set(re.findall(r"\w+", code))))


_LINE = re.compile(r"\*\*In the library:\*\* (.+)\. \*\*Before this:\*\* (.+)\. \*\*Next:\*\* (.+)\.")


@pytest.mark.parametrize(
    "path", [path for path in NOTEBOOKS if path.name[:2] not in {"00", "01", "90"}], ids=lambda path: path.stem
)
def test_a_notebook_names_its_file_and_its_neighbours(path: Path) -> None:
    paragraphs = [part for cell in markdown_of(path) for part in cell.split("\n\n")]
    line = next(filter(None, map(_LINE.fullmatch, paragraphs)), None)
    assert line is not None, "it has no such line"
    files, before, after = (_LINK.findall(part) for part in line.groups())
    assert files and before and len(after) == 1
    for text, target in files:
        file = (path.parent / target).resolve()
        assert text == f"`{target.removeprefix('../')}`" and file.is_file() and file.is_relative_to(LIB)
        assert is_used(module_of(file), path), f"{path.name} does not use {text}"
    for text, target in before + after:
        assert text == f"notebook {target[:2]}" and path.parent / target in NOTEBOOKS


def test_a_file_that_a_notebook_does_not_use_is_noticed() -> None:
    (of_cps,) = (path for path in NOTEBOOKS if path.name.startswith("22_"))
    (without_mechanism,) = (path for path in NOTEBOOKS if path.name.startswith("20_"))
    assert is_used("firsttoken.cps.policies.cross_point", of_cps)
    assert not is_used("firsttoken.cps.policies.online", of_cps)
    assert not is_used("firsttoken.petals.routing", without_mechanism)
