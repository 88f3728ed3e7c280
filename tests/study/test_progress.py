"""What a reader sees in a notebook while something long runs."""

from __future__ import annotations

import nbformat
from nbclient import NotebookClient

from firsttoken.study.progress import UNSEEN

CELL = """
import time
from firsttoken.study import progress
progress.QUIET_S, progress.EVERY_S = 0.2, 0.1
with progress.running("an experiment", 3.0):
    time.sleep(1.2)
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
