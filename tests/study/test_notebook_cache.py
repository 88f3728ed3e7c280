"""What a run keeps from the last one, and what it says of the time that it will take."""

from __future__ import annotations

import base64
import copy
import io
import json
import shutil

import numpy as np
import pytest
from entries import entry
from PIL import Image

from firsttoken.__main__ import main
from firsttoken.study import dtypes, machine, notebook_cache, paths
from firsttoken.study.dtypes import ProductRates
from firsttoken.study.errors import FirstTokenError, NotebookError
from firsttoken.study.files import write_text
from firsttoken.study.notebooks import executed_path, publish, read_notebook
from firsttoken.study.profile import load_profile
from firsttoken.study.record import all_results, write_result


@pytest.fixture
def ran(write_notebook, monkeypatch) -> list[str]:
    """Two notebooks that take no time; the names of those that were run."""
    write_notebook("01_first", 'plot.save(fig, "01-drawn")')
    write_notebook("02_second", 'run_experiment("machine", study)')
    names: list[str] = []

    def run(path, profile: str) -> float:
        names.append(path.stem)
        for file in (paths.EXECUTED / profile / path.name, *notebook_cache.figures_of(path)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("{}", encoding="utf-8")
        return 60.0

    monkeypatch.setattr("firsttoken_studies.running.run_notebook", run)
    monkeypatch.setattr("firsttoken.study.kernel_forkserver.possible", lambda: False)
    monkeypatch.setattr(dtypes, "cpu_rates", lambda: ProductRates(False, 50.0, 1.0))
    return names


def test_a_second_run_keeps_what_nothing_changed_for(ran, capsys) -> None:
    assert main(["run"]) == 0
    assert ran == ["01_first", "02_second"] and "were kept" not in capsys.readouterr().out
    assert main(["run"]) == 0
    out = capsys.readouterr().out
    assert len(ran) == 2 and out.count("kept, ran 20") == 2 and "2 notebooks were kept" in out and "--again" in out
    assert main(["run", "--again"]) == 0
    assert len(ran) == 4


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


@pytest.mark.parametrize("what", ["notebook", "profile", "data", "figure", "copy", "machine", "code"])
def test_whatever_changed_runs_again(ran, what: str, monkeypatch, tmp_path) -> None:
    assert main(["run"]) == 0
    first = paths.NOTEBOOKS / "01_first.ipynb"
    if what == "notebook":
        first.write_text(first.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    elif what == "profile":
        (paths.PROFILES / "quick.yaml").open("a", encoding="utf-8").write("\n")
    elif what == "data":
        (paths.DATA / "adapters").mkdir()
        (paths.DATA / "adapters" / "new").write_text("x", encoding="utf-8")
    elif what == "figure":
        (paths.own_figures() / "01-drawn.png").unlink()
    elif what == "copy":
        (paths.EXECUTED / "quick" / "01_first.ipynb").unlink()
    elif what == "machine":
        monkeypatch.setattr(notebook_cache, "identity", lambda: {"slug": "another"})
    elif what == "code":
        (tmp_path / "library" / "study").mkdir(parents=True)
        monkeypatch.setattr(dtypes, "__file__", str(tmp_path / "library" / "study" / "dtypes.py"))
    ran.clear()
    assert main(["run"]) == 0
    assert "01_first" in ran


def test_results_of_this_profile_concern_only_the_notebook_that_reads_them(ran, make_result) -> None:
    assert main(["run"]) == 0
    ran.clear()
    here = {"slug": machine.machine_slug(), "gpu": None}
    write_result(make_result(machine=here))
    assert main(["run"]) == 0
    assert ran == ["01_first"], "02 runs an experiment itself, so its own result is no input"


def test_the_expected_minutes_are_those_of_the_last_run_here(ran, capsys) -> None:
    assert main(["run", "--only", "01"]) == 0
    assert "no record of how long" in (said := capsys.readouterr().out) and "01_first" in said
    assert main(["run", "--again"]) == 0
    out = capsys.readouterr().out  # 02 has not run yet
    assert "must run: at least 2 min, by the last run here" in out and "about 60 s left" in out
    assert main(["run", "--again"]) == 0
    out = capsys.readouterr().out
    assert "must run: 2 min, by the last run here" in out and "about 60 s left" in out


def test_a_slower_machine_is_told_before_it_begins(ran, make_result, capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(notebook_cache, "cores", lambda: 2)
    rows = [{"notebook": stem, "seconds": 60.0} for stem in ("01_first", "02_second")]
    summary = [entry("products", value=400.0, n=1, unit="GFLOP/s")]
    write_result(make_result(experiment="run", rows=rows, summary=summary))
    assert main(["run", "--again"]) == 0
    out = capsys.readouterr().out
    assert "must run: 8 min, by the run recorded on test-cpu-2c" in out
    assert "multiplies 4.0 times slower" in out and f"{'  01_first':<42} 4 min" in out
    assert out.index("4.0 times slower") < out.index("60.0 s")


def test_what_ran_here_lies_over_what_is_recorded_elsewhere(ran, make_result, capsys, monkeypatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    monkeypatch.setattr(notebook_cache, "cores", lambda: 2)
    summary = [entry("products", value=400.0, n=1, unit="GFLOP/s")]
    rows = [{"notebook": "02_second", "seconds": 60.0}]
    write_result(make_result(experiment="run", rows=rows, summary=summary))
    assert main(["run", "--only", "01"]) == 0
    assert "must run: at least 4 min, by the run recorded on test-cpu-2c\n" in capsys.readouterr().out
    assert main(["run", "--again"]) == 0
    assert "must run: 5 min, by the run recorded on test-cpu-2c and the last one here" in capsys.readouterr().out


def test_a_whole_run_is_recorded_with_what_the_processor_can_do(ran, monkeypatch) -> None:
    monkeypatch.setattr(notebook_cache, "cores", lambda: 2)
    assert main(["run", "--only", "01"]) == 0
    assert all_results() == []
    assert main(["run", "--again"]) == 0
    (result,) = all_results()
    assert (result.experiment, result.duration_s, len(result.rows)) == ("run", 120.0, 2)
    assert result.summary.value("products") == 100.0


def test_a_damaged_memory_is_forgotten(ran) -> None:
    assert main(["run"]) == 0
    (paths.EXECUTED / "quick" / "kept.json").write_text("{", encoding="utf-8")
    ran.clear()
    assert main(["run"]) == 0
    assert len(ran) == 2 and notebook_cache.expected(load_profile("quick")).seconds


def test_a_result_in_the_folder_of_another_machine_is_refused(root, make_result) -> None:
    path = write_result(make_result())
    elsewhere = paths.RESULTS / "laptop-avx2-2c" / "quick" / path.name
    elsewhere.parent.mkdir(parents=True)
    path.rename(elsewhere)
    with pytest.raises(FirstTokenError, match="measured on test-cpu-2c under profile quick, which is another"):
        all_results()
