"""What the README and the notebooks promise exists."""

from __future__ import annotations

import ast
import copy
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from firsttoken import __main__ as main_module
from firsttoken.__main__ import main
from firsttoken.options import parser
from firsttoken.progressiveserve.base_model import ServedConfig
from firsttoken.study import paths
from firsttoken.study.errors import ClaimsError
from firsttoken.study.profile import profile_names
from firsttoken_studies import commands as studies
from firsttoken_studies import ledger
from firsttoken_studies.record import code
from firsttoken_studies.record.claims import load_claims
from firsttoken_studies.record.notebooks import notebook_paths
from firsttoken_studies.record.results import load_result
from firsttoken_studies.record.verdicts import count_verdicts
from firsttoken_studies.registry import EXPERIMENTS

README = paths.ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
NOTEBOOKS = notebook_paths()
# notebooks about a mechanism
MECHANISMS = {
    *[
        "11",
        "12",
        "13",
        "14",
        "15",
        "16",
        "17",
        "18",
        "21",
        "22",
        "23",
        "30",
        "31",
        "32",
        "33",
        "35",
        "40",
        "41",
        "50",
        "51",
        "52",
        "53",
        "54",
        "56",
    ]
}
OPENERS = {"02", "03", "04", "05", "06"}  # one report in ten minutes
RESULT = SimpleNamespace(duration_s=0.0, rows=[], path="x", summary=[])
STAGED = SimpleNamespace(stages=())


def code_cells(path):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def tags(cell):
    return cell["metadata"].get("tags", [])


def test_every_path_in_the_readme_exists():
    named = set(re.findall(r"[`(]((?:notebooks|lib|env|data|figures|tests)/[\w./-]+)[`)]", TEXT))
    assert named
    made = {"figures/own"}  # by a reader's run
    assert [path for path in named - made if not (paths.ROOT / path).exists()] == []


def test_every_link_of_a_page_leads_to_a_file():
    pages = [
        *paths.ROOT.glob("*.md"),
        *(p for room in ("lib", "data", "env") for p in (paths.ROOT / room).rglob("*.md")),
    ]
    links = (
        (page, link)
        for page in pages
        if paths.TEMPLATES not in page.parents and page.name != "page.md"
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    )
    assert [f"{page}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_what_to_audit_names_its_files_lines_and_tests():
    """Lines are rounded, so that a file may change a little without the page; the rows are those of the sums."""
    page = (paths.ROOT / "lib" / "README.md").read_text(encoding="utf-8")
    row = r"^\| \[`(\S+\.py)`\]\(\1\) \| (\d+) \| (\d+) \| [^|]+\. \| [^|]+ \| `(\S+\.py)::(\w+)` \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert len(rows) == page.count("\n| [`") and len({file for file, *_ in rows}) == len(rows)
    counts = [len((paths.ROOT / "lib" / file).read_text(encoding="utf-8").splitlines()) for file, *_ in rows]
    rounded, minutes = (sum(int(entry[column]) for entry in rows) for column in (1, 2))
    assert f"{len(rows)} files,\n{rounded:,} lines of Python" in page and f"about {round(minutes, -1)} minutes" in page
    off = [(entry[0], count) for entry, count in zip(rows, counts, strict=True) if abs(count - int(entry[1])) > 20]
    assert off == [] and sum(counts) <= 5000
    for *_, file, name in rows:
        text = (paths.ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(?:def {name}\(|{name} = )", text, re.MULTILINE), (file, name)


def test_every_command_in_the_readme_exists(capsys):
    commands = set(re.findall(r"firsttoken (\w+)", TEXT)) & {
        "run",
        "measure",
        "capacity",
        "claims",
        "fetch",
        "stage",
        "serve",
        "doctor",
    }
    assert {"measure", "doctor"} <= commands
    shown = subprocess.run([sys.executable, "-m", "firsttoken", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "usage" in shown.stdout
    for command in commands:  # in this process: another would import torch for each
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0 and f"usage: firsttoken {command}" in capsys.readouterr().out
    for line in re.findall(r"firsttoken measure ([a-z_ ]+)", TEXT):
        assert set(line.split()) <= set(EXPERIMENTS)
    assert set(re.findall(r"--profile ([a-z]+)", TEXT)) <= set(profile_names())


def commands(*pages: str) -> list[list[str]]:
    """Every `firsttoken ...` line of the pages, as a shell hands it on."""
    texts = [(paths.ROOT / page).read_text(encoding="utf-8") for page in pages]
    blocks = [block for text in texts for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = [line for text in texts for line in re.findall(r"`(firsttoken (?!COMMAND)[^`]+)`", text)]
    asked = (" ".join(line.split()) for line in [*lines, *inline])
    return [shlex.split(line, comments=True)[1:] for line in asked if line.startswith("firsttoken ")]


def test_the_commands_of_the_pages_run_as_they_stand(monkeypatch):
    """Their options are taken, their experiments exist, and every section of their profile that they set is read."""
    pages = (
        "README.md",
        "env/README.md",
        "CONTRIBUTING.md",
        *(str(p) for p in (paths.ROOT / "lib").rglob("README.md")),
    )
    found = [words for words in commands(*pages) if "EXPERIMENT" not in words]
    assert {"stage", "serve", "measure", "claims", "fetch", "doctor"} <= {words[0] for words in found}
    asked = []
    ran = "firsttoken_studies.experiments.run_experiment"
    monkeypatch.setattr(ran, lambda name, profile, because: asked.append((name, profile)) or RESULT)
    for module in (main_module, studies):
        monkeypatch.setattr(module, "check_used", lambda settings, used: None)
    monkeypatch.setattr("firsttoken.progressiveserve.staging.stage_model", lambda *a: asked.append((a[0], a)) or STAGED)
    for words in found:
        options = parser(main_module.COMMANDS).parse_args(words)
        options.answer = {}
        if words[0] in ("measure", "stage"):
            assert options.command(options) == 0, words
    staged = [given for _, given in asked if isinstance(given, tuple)]
    assert all(profile.section("served", ServedConfig) for profile, *_ in staged)
    assert any(profile.section("served", ServedConfig).task_adapter == "" for profile, *_ in staged)
    assert {name for name, given in asked if not isinstance(given, tuple)} <= set(EXPERIMENTS)


def test_the_pages_show_the_record():
    assert ledger.outdated_pages() == [], "run `firsttoken claims --update`"


def test_a_result_in_the_readme_is_put_there_by_the_program():
    """What its template says without placeholders and commands has no number with a unit but those of conditions."""
    template = (paths.TEMPLATES / "README.md").read_text(encoding="utf-8")
    prose = re.sub(r"```.*?```|\{\{.*?\}\}|`[^`]*`|\]\([^)]*\)", "", template, flags=re.DOTALL)
    numbers = set(re.findall(r"\b\d+\.\d+\b|\b\d+(?= ?(?:%|times|x\b|s\b|ms\b|nats|points|tokens))", prose))
    conditions = {
        "0.05",
        "0.1",
        "1.5",
        "1.6",
        "2.0",
        "3",
        "3.1",
        "3.11",
        "5",
        "95",
    }  # links, sizes, gates, names, intervals
    identifiers = set(re.findall(r"arXiv:(\d+\.\d+)", prose))
    assert numbers - conditions - identifiers == set()


def test_a_notebook_gets_its_verdicts_by_the_name_of_a_claim(capsys):
    ledger.verdicts("progressive.block-bytes")
    assert capsys.readouterr().out.endswith("(progressive.block-bytes)\n")
    with pytest.raises(
        ClaimsError, match=r"no claim 'progressive.block-byte'; .*did you mean 'progressive.block-bytes'"
    ):
        ledger.verdicts("progressive.block-byte")


def test_a_notebook_shows_the_verdicts_of_the_ledger(capsys):
    """nbval would find another wording too, half an hour later."""
    held = 0
    for path in NOTEBOOKS:
        for cell in code_cells(path):
            calls = (node for node in ast.walk(ast.parse("".join(cell["source"]))) if isinstance(node, ast.Call))
            for call in (call for call in calls if ast.unparse(call.func) == "ledger.verdicts"):
                ledger.verdicts(*(argument.value for argument in call.args))
                shown = "".join("".join(out.get("text", "")) for out in cell["outputs"])
                mend = f"run `firsttoken run --only {path.name[:2]} --publish`"
                assert capsys.readouterr().out in shown, mend
                held += len(call.args)
    assert held > len(NOTEBOOKS)
    counts = count_verdicts(ledger.claims(), ledger.recorded(), ledger.machine(), ledger.log())
    (shown,) = ("".join(cell["outputs"][0]["text"]) for cell in code_cells(NOTEBOOKS[-1]) if is_count(cell))
    assert str(counts) in shown, "run `firsttoken run --only 90 --publish`"


def is_count(cell):
    return "print(count_verdicts(" in "".join(cell["source"])


def test_a_run_that_says_otherwise_than_the_record_is_named(capsys):
    recorded = next(result for result in ledger.recorded() if result.experiment == "sizes")
    sizes = replace(recorded, git_revision="unknown")  # a commit that git cannot know: nothing is said of the code
    claim = next(claim for claim in ledger.claims() if claim.id == "progressive.checkpoint-size")
    grown = copy.deepcopy(sizes.summary)
    grown.of(claim.measure, **claim.where)["value"] = 20.0
    agree = "where both judge a claim of this experiment, they agree"
    told = "the checkpoint is 13.5 GB; your run 20 GB, the record 13.5 GB (progressive.checkpoint-size)"
    for summary, said in ((grown, f"OTHERWISE than the record: {told}"), (sizes.summary, agree)):
        ledger.beside(replace(sizes, profile="quick", summary=summary), sizes)
        assert capsys.readouterr().out.splitlines()[2:] == [said]
    other_code = "the record was made by other code"
    for digest, said in ((f"{code.FORM}-of other files", [other_code]), ("of the text of functions", [])):
        ledger.beside(replace(sizes, profile="quick"), replace(sizes, code=digest))
        assert capsys.readouterr().out.splitlines()[2:] == [*said, agree]
    ledger.beside(sizes, sizes)
    assert capsys.readouterr().out.splitlines()[1:] == ["recorded: this run is the record"]
    ledger.beside(sizes, None)
    assert capsys.readouterr().out.splitlines()[1:] == ["recorded: nothing yet"]


def test_too_few_observations_disagree_by_direction_alone(capsys):
    """Of two or three values an interval says nothing; an effect in the other direction does."""
    recorded = load_result("crosspoint_replayed", "full", machine="any")
    claim = next(claim for claim in ledger.claims() if claim.id == "cps.p99-below-swap")
    for value, disagrees in ((60.0, False), (-5.0, True)):
        summary = copy.deepcopy(recorded.summary)
        summary.of(claim.measure, **claim.where).update(value=value, low=value, high=value, n=1)
        ledger.beside(replace(recorded, profile="quick", summary=summary), recorded)
        assert (f"({claim.id})" in capsys.readouterr().out) is disagrees


def test_a_record_disagrees_on_no_claim_that_its_profile_does_not_answer(capsys):
    recorded = load_result("eight_bits", "full", machine="any")
    for name, profile, disagrees in (("petals.served-decode", "tasks", False), ("petals.overhead", "full", True)):
        claim = next(claim for claim in ledger.claims() if claim.id == name)
        assert not claim.profiles or profile in claim.profiles
        summary = copy.deepcopy(recorded.summary)
        summary.of(claim.measure, **claim.where).update(value=90.0, low=89.0, high=91.0)
        ledger.beside(replace(recorded, profile="quick", summary=summary), recorded)
        assert (f"({name})" in capsys.readouterr().out) is disagrees


def test_every_claim_names_a_notebook_that_exists():
    numbers = {path.name[:2] for path in NOTEBOOKS}
    assert {claim.notebook for claim in load_claims(paths.STUDIES, EXPERIMENTS)} <= numbers


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_parameters_are_literals(self, path):
        (cell,) = [cell for cell in code_cells(path) if "parameters" in tags(cell)]
        for statement in ast.parse("".join(cell["source"])).body:
            assert isinstance(statement, ast.Assign)
            ast.literal_eval(statement.value)

    def test_is_committed_executed_and_without_errors(self, path):
        for cell in code_cells(path):
            assert cell["execution_count"] is not None
            assert all(output["output_type"] != "error" for output in cell["outputs"])

    def test_holds_no_path_of_the_machine_that_ran_it(self, path):
        assert re.findall(r"(?<![\w.])/(?:tmp|home|root|Users|mnt)/\w+", path.read_text(encoding="utf-8")) == []

    def test_says_claim_minutes_and_verdict(self, path):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert re.search(r"\*\*Time\.\*\* \d+ human minutes \+ [\d.]+ compute minute", prose)
        assert sum("nbval-check-output" in tags(cell) for cell in code_cells(path)) == 1

    def test_a_cell_can_be_read_at_once(self, path):
        assert all(len(cell["source"]) <= 25 for cell in code_cells(path))

    def test_a_mechanism_has_its_cells(self, path):
        """The algorithm, a scene in which it acts, a line to change, and a check that fails where it does not work."""
        there = {tag for cell in code_cells(path) for tag in tags(cell)}
        assert path.name[:2] not in MECHANISMS or there >= {"imports", "mechanism", "scene", "change", "check"}

    def test_an_opener_has_its_cells(self, path):
        """The algorithm, a scene, a check, where each item of the report is, and answers that are asserted."""
        if path.name[:2] in OPENERS:
            tagged = {tag: "".join(cell["source"]) for cell in code_cells(path) for tag in tags(cell)}
            assert tagged.keys() >= {"imports", "mechanism", "scene", "check", "answers"}
            assert re.search(r"\bassert |\bshow\.check\(", tagged["answers"])
            assert any("opener_rows(" in "".join(cell["source"]) for cell in code_cells(path))
            cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
            prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
            assert prose.count("<details><summary>Answer</summary>") == prose.count("</details>") == 3

    def test_a_figure_shows_the_readers_run(self, path):
        """A cell that draws a recorded result draws one of an experiment that this notebook runs over it. Of the
        profile ``tasks``, which takes hours, and of an experiment without a quick run a notebook runs nothing."""
        cells = ["".join(cell["source"]) for cell in code_cells(path)]
        own = {name for cell in cells for name in re.findall(r"(?m)^(\w+) = run_experiment\(", cell)}
        own |= {name for cell in cells for name in re.findall(r"now\w*", cell)}
        slow = "|".join(name for name, experiment in EXPERIMENTS.items() if "quick" not in experiment.profiles)
        loading = re.compile(rf'(?m)^(\w+) = load_result\((?!"\w+", "tasks"|"(?:{slow})")')
        loaded = {name for cell in cells for name in loading.findall(cell)} | {"recorded"}
        drawn = [set(re.findall(r"\w+", cell)) for cell in cells if "plot.save(" in cell]
        if path.name[:2] not in {"42", "45", "90"}:  # these run nothing
            assert [cell for cell in drawn if loaded & cell and not own & cell] == []
