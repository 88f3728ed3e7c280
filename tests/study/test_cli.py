from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from entries import entry
from waiting import until

from firsttoken.__main__ import main
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.study import paths
from firsttoken.study.errors import NotebookError
from firsttoken.study.option_values import setting
from firsttoken_serve.service_config import KEY_VARIABLE, ServiceConfig
from firsttoken_studies import ledger
from firsttoken_studies.record.claims import load_claims
from firsttoken_studies.record.notebooks import notebook_paths
from firsttoken_studies.record.results import write_result
from firsttoken_studies.registry import EXPERIMENTS

pytestmark = pytest.mark.usefixtures("root")


def test_notebooks_run_in_order_and_a_failing_one_fails_the_run(write_notebook, capsys) -> None:
    write_notebook("11_breaks", "values = [1]\nvalues[7]")
    write_notebook("01_works", "print('profile is', profile)")
    assert main(["run", "--profile", "quick"]) == 1
    out, err = capsys.readouterr()
    assert out.index("01_works") < out.index("11_breaks")
    assert "notebook 11_breaks.ipynb failed" in out and "IndexError: list index out of range" in out
    assert "\x1b[" not in out
    assert "beside the reports:" in out and "executed notebooks:" in out
    assert "| claim | report | yours: " in (paths.EXECUTED / "quick" / "claims.md").read_text(encoding="utf-8")
    assert "1 of 2 notebooks failed" in err
    (copy,) = (paths.EXECUTED / "quick").glob("*.ipynb")
    assert copy.name == "01_works.ipynb" and "profile is quick" in copy.read_text(encoding="utf-8")


def test_notebooks_are_chosen_by_number(write_notebook, capsys) -> None:
    chosen = write_notebook("03_third")
    write_notebook("10_tenth")
    (paths.NOTEBOOKS / "draft.ipynb").write_text("{}", encoding="utf-8")
    assert notebook_paths(["3"]) == [chosen]
    assert main(["run", "--list"]) == 0
    assert capsys.readouterr().out == "03  About 03_third\n10  About 10_tenth\n"
    with pytest.raises(NotebookError, match="no notebook 77; there are: 03, 10"):
        notebook_paths(["3", "77"])
    assert main(["run", "--only", "77"]) == 2
    assert capsys.readouterr().err == "firsttoken: no notebook 77; there are: 03, 10\n"


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_leaves_nothing_half_written(root: Path, write_notebook) -> None:
    started = root / "started"
    write_notebook(
        "01_slow",
        f"import os, pathlib, time\npathlib.Path({str(started)!r}).write_text(str(os.getpid()))\ntime.sleep(120)",
    )
    library = Path(sys.modules["firsttoken"].__file__).parents[1]
    search = os.pathsep.join([str(library), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"FIRSTTOKEN_ROOT": str(root), "PYTHONPATH": search}
    process = subprocess.Popen(
        [sys.executable, "-m", "firsttoken", "run"],
        env=environment,
        stderr=subprocess.PIPE,
        # tests that run in the background of a shell ignore SIGINT, and what they start would too
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        until(lambda: started.exists() and started.read_text(), "it has begun")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, b"interrupted" in err, b"Traceback" in err) == (130, True, False)
    assert list((root / "executed").rglob("*.ipynb")) == []
    until(lambda: not alive(int(started.read_text())), "its kernel has gone")


def test_a_reader_that_has_read_enough_ends_a_command_quietly() -> None:
    """`firsttoken doctor | head -1`."""
    command = [sys.executable, "-u", "-m", "firsttoken", "doctor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.wait(120), process.stderr.read()) == (128 + signal.SIGPIPE, b"")


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_measure_changes_settings_and_prints_the_summary(capsys) -> None:
    small = ["copy_mib=1", "disk_mib=1", "matmul_n=16", "repeats=1"]
    settings = [part for text in small for part in ("--set", f"machine.{text}")]
    assert main(["measure", "machine", *settings]) == 0
    out = capsys.readouterr().out
    assert "machine: " in out and "  matmul_fp32: " in out


@pytest.mark.parametrize(("experiment", "briefly"), [("machine", False), ("swarm_transport", True)])
def test_processes_that_compute_in_turns_wait_briefly(monkeypatch, experiment: str, briefly: bool) -> None:
    """As those do that users start: before torch is loaded, and told to all that this one starts."""
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    told = []

    def run_experiment(name: str, profile: object, because: str) -> SimpleNamespace:
        told.append("GOMP_SPINCOUNT" in os.environ)
        return SimpleNamespace(duration_s=0.0, rows=[], path="", summary=[])

    monkeypatch.setattr("firsttoken_studies.experiments.run_experiment", run_experiment)
    assert main(["measure", experiment]) == 0 and told == [briefly]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "machin"], "firsttoken: no experiment 'machin'; known: "),
        (["measure", "machine", "--profile", "huge"], "firsttoken: no profile 'huge'"),
        (["measure", "machine", "--set", "machine.repeat=1"], "unknown key 'repeat'"),
        (["claims", "--update"], "templates/README.md: [Errno 2] No such file"),
        (["claims", "--update", "--machine", "typo"], "no results of a machine 'typo'"),
        (["measure", "machine", "sizes", "nosuch"], "no experiment 'nosuch'"),
        (["measure", "machine", "--set", "seed=-1"], "seed: expected 0 to 4,294,967,295, not -1"),
        (["measure", "stage_quality", "--set", "quality.recipes=[]"], "recipes: expected at least one, not []"),
        (["stage", "x", "--set", "served.block_size=1000000000000"], "block_size: expected 0 to 1,000"),
        (
            ["stage", "x", "--adapters", "none", "--set", "model=~nosuch/x", "--set", "served.task_adapter="],
            "no model folder ~nosuch/x",
        ),
        (["run", "--only", ""], "no notebook ''"),
    ],
)
def test_an_error_is_one_line(arguments: list[str], message: str, capsys) -> None:
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "x", "--gbit-per-s", "nan"], "'nan' is no rate"),
        (["serve", "x", "--gbit-per-s", "-1"], "'-1' is no rate"),
        (["serve", "x", "--gbit-per-s", "inf"], "'inf' is no rate"),
        (["serve", "x", "--port", "70000"], "give a whole number from 0 to 65535"),
        (["serve", "x", "--replicas", "0"], "give a whole number from 1 to 64"),
        (["serve", "x", "--token-budget", "0"], "give a whole number from 1 to"),
        (["serve", "x", "--host", ""], "the address is empty; name one"),
        (["stage", ""], "the name of a folder is empty"),
        (["measure", "machine", "--set", "machine.repeats=["], "is not a YAML value"),
        (["measure", "machine", "--set", "machine.repeats=.nan"], "is not a YAML value"),
        (["measure", "machine", "--set", "=1"], "is not of the form key=value"),
    ],
)
def test_an_option_is_checked_before_anything_starts(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_what_serve_is_told_reaches_the_service(monkeypatch) -> None:
    """All of it, under the names of the configuration."""
    served: list[ServiceConfig] = []
    monkeypatch.setattr("firsttoken_serve.http.launch.serve_forever", served.append)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    told = ["--prefix-store", "s", "--prefix-owner", "alice", "--variant", "a=b", "--variant", "c=d", "--max-running"]
    assert main(["serve", "x", *told, "3", "--share-prefixes"]) == 0 and main(["serve", "x", "--swarm", "h:1"]) == 0
    prefixes = {"prefix_store": Path("s"), "prefix_owner": "alice", "share_prefixes": True}
    variants = (("a", Path("b")), ("c", Path("d")))
    assert served == [
        ServiceConfig(Path("x"), **prefixes, variants=variants, max_running=3, grace_s=30.0),
        ServiceConfig(Path("x"), swarm=("h:1",), grace_s=30.0),
    ]


@pytest.mark.parametrize("folder", [".", "/"])
def test_a_folder_that_is_no_name_for_a_checkpoint(folder: str, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "mine.txt").write_text("keep me", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    options = ["--set", "model=random:tiny", "--set", "served.block_start=1", "--set", "served.block_size=2"]
    assert main(["stage", folder, *options, "--adapters", "none"]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and (tmp_path / "mine.txt").read_text() == "keep me"


def test_a_setting_that_nothing_reads_is_an_error(capsys) -> None:
    assert main(["measure", "sizes", "--set", "served.nosuch=1"]) == 2
    assert "--set served.nosuch: nothing that ran reads this section" in capsys.readouterr().err


def test_the_empty_text_is_a_value() -> None:
    assert setting("served.task_adapter=") == ("served.task_adapter", "")
    assert setting("a.limit=null") == ("a.limit", None) and setting("a.rate=1e-4") == ("a.rate", 1e-4)


@pytest.fixture
def templates(root: Path) -> None:
    """A template for each page."""
    paths.TEMPLATES.mkdir()
    paths.INDEX.write_text("[]\n", encoding="utf-8")
    for page in ("README.md", "CLAIMS.md", "CAPACITY.md", "INDEX.md", "VICTIMS.md", "mechanisms.yaml"):
        (paths.TEMPLATES / page).write_text("Recorded: `{{ machine }}`\n{{ counts }}\n", encoding="utf-8")


def test_the_pages_keep_their_verdicts(root: Path, templates, make_result, capsys) -> None:
    claim = load_claims(paths.STUDIES, EXPERIMENTS)[0]
    summary = [entry(claim.measure, claim.where, value=25.0)]
    for slug, found in (("a-4c", summary), ("b-4c", [entry(value=1)])):
        machine = {"slug": slug, "gpu": None}
        write_result(make_result(experiment=claim.experiment, profile="full", machine=machine, summary=found))
    assert main(["claims", "--update", "--machine", "a-4c"]) == 0
    before = (root / "README.md").read_text(encoding="utf-8")
    assert main(["claims", "--update", "--machine", "b-4c"]) == 2
    assert "b-4c has 0 verdicts, the pages show 1 of a-4c; measure the rest" in capsys.readouterr().err
    assert (root / "README.md").read_text(encoding="utf-8") == before


def test_the_pages_are_updated_and_checked(root: Path, templates, make_result, capsys) -> None:
    assert main(["claims", "--check"]) == 1
    write_result(recorded := make_result(profile="full", machine={"slug": "elsewhere-4c", "gpu": None}))
    assert main(["claims", "--update", "--machine", "elsewhere-4c"]) == 0
    assert main(["claims", "--check"]) == 1 and "has no line in record.jsonl" in capsys.readouterr().err
    ledger.note_run(recorded)
    assert main(["claims", "--check"]) == 0, "the machine of the pages is checked, not this one"
    assert "Recorded: `elsewhere-4c`" in (root / "README.md").read_text(encoding="utf-8")
    assert main(["claims", "--machine", "elsewhere-4"]) == 2
    err = capsys.readouterr().err
    assert "no results of a machine 'elsewhere-4'" in err and "did you mean 'elsewhere-4c'?" in err


def test_the_log_is_printed_and_keeps_a_reason_for_each_change(root: Path, make_result, capsys) -> None:
    write_result(recorded := make_result(profile="full"))
    ledger.note_run(recorded)
    assert main(["record", "--remove", "machine"]) == 2 and "add --because TEXT" in capsys.readouterr().err
    assert main(["record", "--remove", "machine", "--because", "moved"]) == 2
    assert "add --machine NAME" in capsys.readouterr().err
    assert main(["record", "--remove", "machine", "--machine", "nobody", "--because", "moved"]) == 2
    assert f"no result of machine on nobody is recorded; known: {recorded.slug}" in capsys.readouterr().err
    assert main(["record", "--remove", "machine", "--machine", recorded.slug, "--because", "moved"]) == 0
    out = capsys.readouterr().out
    assert "removal machine full" in out and ": moved" in out and "2 lines; the last has sha256" in out
    assert recorded.path.exists() and ledger.recorded() == [] and ledger.log().standing == {}
    assert not any("withdrawn" in fault for fault in ledger.record_faults())
    write_result(replace(recorded, rows=[row | {"copy_s": 9.0} for row in recorded.rows]))
    assert any("machine on test-cpu-2c, which was withdrawn" in fault for fault in ledger.record_faults())


def answered(capsys, *words: str) -> dict:
    """What a program reads of a command: one line of JSON."""
    assert main([*words, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1 and out.isascii()
    return json.loads(out)


def test_a_program_reads_one_line_of_json(root: Path, make_result, capsys, monkeypatch) -> None:
    monkeypatch.setattr("firsttoken.assets.lock.load_lock", list)
    doctor = answered(capsys, "doctor")
    assert doctor["profiles"] == ["quick"] and doctor["packages"]["torch"] and doctor["clone"] == str(paths.ROOT)
    assert "machine" in answered(capsys, "doctor", "--missing")["quick"]
    ledger.note_run(make_result(profile="full"))
    (line,) = answered(capsys, "record")["lines"]
    assert (line["experiment"], line["machine"]) == ("machine", "test-cpu-2c")
    everything = answered(capsys, "claims")["claims"]
    assert [one["claim"]["id"] for one in everything] == [claim.id for claim in ledger.claims()]
    assert answered(capsys, "claims", "--report", "petals", "--verdict", "reproduced")["claims"] == []
    small = ["machine.copy_mib=1", "machine.disk_mib=1", "machine.matmul_n=16", "machine.repeats=1"]
    measured = answered(capsys, "measure", "machine", *(word for one in small for word in ("--set", one)))["machine"]
    assert measured["rows"] and {"measure", "value", "where"} <= measured["summary"][0].keys()
    assert main(["claims", "--report", "petal", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("firsttoken: no report 'petal'; known: ")


def test_a_terminal_has_counts_of_the_claims_unless_some_are_chosen(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["claims"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 12 and max(map(len, lines)) <= 110 and any("--all" in line for line in lines)
    claims = ledger.claims()
    for words, count in ((["--all"], len(claims)), (["--report", "CPS"], sum(one.report == "CPS" for one in claims))):
        assert main(["claims", *words]) == 0
        assert sum(line[:2] == "| " for line in capsys.readouterr().out.splitlines()) == count + 2
    assert main(["claims", "--verdict", "trend"]) == 2
    assert "did you mean 'trend-only'?" in capsys.readouterr().err


def test_missing_results_are_listed(capsys) -> None:
    assert main(["doctor", "--missing"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("quick: ")]
    assert {"machine", "layer_distance", "stage_quality"} <= set(line.removeprefix("quick: ").split(", "))


def test_the_help_of_serve_names_every_scheduler(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = capsys.readouterr().out
    assert [name for name in SCHEDULERS if name not in said] == []


def test_another_word_for_what_computes_is_refused(monkeypatch, capsys) -> None:
    """Before anything is done, and by name."""
    monkeypatch.setenv("FIRSTTOKEN_ACCELERATOR", "cuda")
    assert main(["claims", "--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("firsttoken: FIRSTTOKEN_ACCELERATOR is 'cuda'; give it one of: kernels (")
