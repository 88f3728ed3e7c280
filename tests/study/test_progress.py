"""What a reader sees in a notebook while something long runs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from firsttoken.study import paths, progress
from firsttoken.study.progress import NOTEBOOK, UNSEEN, track

CELL = """
import os, time
from types import SimpleNamespace
from firsttoken.study import progress
looks = []  # at a clock that is a second on at the third, which is that of the second line
progress.QUIET_S, progress.EVERY_S = 0.2, 0.1
progress.time = SimpleNamespace(monotonic=lambda: looks.append(1) or float(len(looks) > 2))
with progress.running("an experiment", 3.0):
    while len(looks) < 4 and progress.UNSEEN not in os.environ:
        time.sleep(0.01)
print("over")
"""


class Watched(NotebookClient):
    """Keeps what the kernel shows while the cell runs."""

    def process_message(self, message, cell, cell_index):
        if message["msg_type"] in ("display_data", "update_display_data"):
            self.seen.append(message["content"]["data"]["text/plain"])
        return super().process_message(message, cell, cell_index)


def seen(monkeypatch, **environment: str) -> tuple[list[str], list]:
    monkeypatch.delenv(UNSEEN, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(CELL)]
    client = Watched(notebook, kernel_name="python3")
    client.seen = []
    client.execute()
    return client.seen, notebook.cells[0].outputs


def test_a_line_counts_the_seconds_and_goes_when_it_is_over(monkeypatch) -> None:
    told, outputs = seen(monkeypatch)
    assert told[0] == "an experiment has run for 0 s of about 3 s"
    assert "an experiment has run for 1 s of about 3 s" in told and told[-1] == ""
    assert [output.get("text") or output.data["text/plain"] for output in outputs] == ["", "over\n"]


def test_nothing_is_shown_where_nobody_looks(monkeypatch) -> None:
    told, outputs = seen(monkeypatch, **{UNSEEN: "1"})
    assert told == [] and [output.text for output in outputs] == ["over\n"]


def test_bars_of_other_packages_are_text() -> None:
    """A widget's state is not kept, so that a notebook would show a reference to what is gone."""
    notebook = nbformat.v4.new_notebook()
    bar = "import firsttoken\nfrom tqdm.auto import tqdm\nassert list(tqdm(range(3))) == [0, 1, 2]"
    notebook.cells = [nbformat.v4.new_code_cell(bar)]
    NotebookClient(notebook, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    assert {output.output_type for output in outputs} == {"stream"} and "widgets" not in notebook.metadata
    assert "3/3" in "".join(output.text for output in outputs)


@pytest.fixture
def pass_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets so many seconds pass, as outside of notebooks, with short waits."""
    now = [0.0]
    for name in (NOTEBOOK, UNSEEN):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("START_S", 0.0), ("LINE_S", 0.5), ("QUIET_S", 0.5)):
        monkeypatch.setattr(progress, name, value)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return lambda seconds: now.append(now.pop() + seconds)


def test_a_log_has_lines_at_the_start_now_and_then_and_at_the_end(capsys, pass_s) -> None:
    steps = track("abc", desc="healing", unit="step")
    for _ in steps:
        steps._first.join()  # the first line is written
        pass_s(0.6)
    first, *between, last = capsys.readouterr().err.splitlines()
    assert first == "firsttoken: healing: 0 of 3 steps" and last == "firsttoken: healing: 3 of 3 steps in 2 s"
    assert between[0] == "firsttoken: healing: 1 of 3 steps, 1 s left"
    with track(desc="a file", total=4_000_000, initial=1_000_000, unit="B") as bar:
        pass_s(0.6)
        bar.set_postfix_str("slow")
    assert "firsttoken: a file: 1.0 of 4.0 MB (slow)\n" in capsys.readouterr().err


def test_what_is_short_or_within_another_has_no_line(capsys, pass_s, monkeypatch) -> None:
    monkeypatch.setattr(progress, "START_S", 60.0)
    list(track(range(2), desc="batches", unit="batch"))
    for _ in track(range(2), desc="inner", leave=False):
        pass_s(0.2)
    with pytest.raises(ZeroDivisionError):
        for number in track(range(2), desc="fails"):
            pass_s(0.2 / number)
    assert capsys.readouterr().err == ""


def test_a_notebook_and_what_it_starts_show_no_lines(monkeypatch) -> None:
    for name in (UNSEEN, "PYTEST_CURRENT_TEST"):  # with the latter a kernel does not show what its children write
        monkeypatch.delenv(name, raising=False)
    count = "import time\nfrom firsttoken.study import progress\nprogress.START_S = 0\n"
    count += "for _ in progress.track(range(2), desc='x'): time.sleep(0.3)"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {count!r}], check=True)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"{count}\n{child};")])
    NotebookClient(notebook, kernel_name="python3").execute()
    assert notebook.cells[0].outputs == []


def test_every_bar_is_the_one_that_a_log_can_show() -> None:
    library = sorted(paths.ROOT.glob("lib/*/**/*.py"))
    assert [file.name for file in library if "tqdm(" in file.read_text()] == ["progress.py"]
