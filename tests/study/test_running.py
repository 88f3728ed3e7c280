"""A run of the notebooks: what is expected of it, which run, what is recorded and published."""

from __future__ import annotations

import base64
import copy
import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from firsttoken.__main__ import main
from firsttoken.study import paths
from firsttoken.study.errors import FirstTokenError, NotebookError
from firsttoken.study.files import write_text
from firsttoken.study.profile import load_profile
from firsttoken_studies.record.notebooks import executed_path, notebook_paths, publish, read_notebook
from firsttoken_studies.record.results import all_results, write_result
from firsttoken_studies.running import minutes_text


@pytest.fixture
def ran(write_notebook, monkeypatch) -> list[str]:
    """Three notebooks that take no time; the names of those that were run."""
    for name in ("01_first", "02_second", "03_third"):
        write_notebook(name)
    names: list[str] = []

    def run(path, profile: str) -> float:
        names.append(path.stem)
        return 60.0 * len(names)

    monkeypatch.setattr("firsttoken_studies.running.run_notebook", run)
    monkeypatch.setattr("firsttoken_studies.record.kernel_forkserver.possible", lambda: False)
    return names


def test_every_run_runs_all_and_a_whole_one_is_recorded(ran, capsys) -> None:
    assert main(["run", "--only", "01"]) == 0 and all_results() == []
    assert "\n1 notebook; no record has their minutes" in capsys.readouterr().out
    ran.clear()
    assert main(["run"]) == 0 and len(ran) == 3
    (result,) = all_results()
    assert (result.experiment, result.duration_s, len(result.rows)) == ("run", 360.0, 3)
    ran.clear()
    assert main(["run"]) == 0 and len(ran) == 3, "nothing is skipped"
    out = capsys.readouterr().out
    assert f"\n3 notebooks, about 6 minutes by the record of {result.slug}\n" in out


def test_a_notebook_that_the_record_lacks_counts_as_the_median(ran, make_result) -> None:
    rows = [{"notebook": stem, "seconds": took_s} for stem, took_s in (("01_first", 60.0), ("02_second", 360.0))]
    write_result(make_result(experiment="run", rows=rows))
    profile = load_profile("quick")
    assert minutes_text(notebook_paths(), profile) == "3 notebooks, at least 10 minutes by the record of test-cpu-2c"
    assert minutes_text(notebook_paths(["1"]), profile) == "1 notebook, about 60 s by the record of test-cpu-2c"


@pytest.mark.parametrize("cell", ["as it ran", "changed since"])
def test_what_a_run_showed_is_published_with_figures_in_few_colours(write_notebook, cell: str) -> None:
    path = write_notebook("01_first", "draw()")
    notebook, drawn = read_notebook(path), io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    Image.fromarray(noise).save(drawn, "PNG")
    png = {"output_type": "display_data", "data": {"image/png": base64.b64encode(drawn.getvalue()).decode()}}
    ran = copy.deepcopy(notebook)
    ran["cells"].insert(2, {"cell_type": "code", "id": "injected", "source": 'profile = "quick"', "outputs": []})
    ran["cells"][-1] |= {"outputs": [png], "execution_count": 2}
    ran["cells"][1] |= {"execution_count": 1, "source": ran["cells"][1]["source"] if cell == "as it ran" else "1"}
    write_text(executed_path(path, "quick"), json.dumps(ran))
    if cell == "changed since":
        with pytest.raises(NotebookError, match="was not run as it stands"):
            publish(path, "quick")
        assert read_notebook(path) == notebook
        return
    publish(path, "quick")
    published = read_notebook(path)["cells"]
    assert [one["id"] for one in published] == [one["id"] for one in notebook["cells"]]
    shown = Image.open(io.BytesIO(base64.b64decode(published[-1]["outputs"][0]["data"]["image/png"])))
    assert (shown.mode, shown.size) == ("P", (80, 60))


def test_only_what_the_repository_shows_is_published(root, capsys) -> None:
    shutil.copy(root / "env/profiles/quick.yaml", root / "env/profiles/full.yaml")
    assert main(["run", "--profile", "full", "--publish"]) == 2
    assert "notebooks/ shows the quick profile" in capsys.readouterr().err


def test_a_result_in_the_folder_of_another_machine_is_refused(root, make_result) -> None:
    path = write_result(make_result())
    elsewhere = paths.RESULTS / "laptop-avx2-2c" / "quick" / path.name
    elsewhere.parent.mkdir(parents=True)
    path.rename(elsewhere)
    with pytest.raises(FirstTokenError, match="measured on test-cpu-2c under profile quick, which is another"):
        all_results()
