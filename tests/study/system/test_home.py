"""A home that cannot be written: notebooks run all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from firsttoken.__main__ import main
from firsttoken.study import paths
from firsttoken_studies.record.kernel_forkserver import kept_elsewhere

VARIABLES = ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR", "HF_HOME")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def a_file(tmp_path: Path) -> Path:
    """Below it nobody can make a folder, not even root."""
    path = tmp_path / "a file"
    path.touch()
    return path


def test_a_home_of_ones_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "made when needed"))
    assert kept_elsewhere(tmp_path / "cache") == {}


@pytest.mark.parametrize("below", ["", "own"])
def test_without_a_home_all_is_kept_elsewhere(
    tmp_path: Path, a_file: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    monkeypatch.setenv("HOME", str(a_file / below))
    monkeypatch.setenv("MPLCONFIGDIR", "set by the user")
    folders = kept_elsewhere(tmp_path)
    assert folders.keys() == set(VARIABLES) - {"MPLCONFIGDIR"}
    assert len(set(folders.values())) == 3 and all(Path(folder).parent == tmp_path for folder in folders.values())


def test_a_home_of_someone_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_nobody) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    monkeypatch.setenv("HOME", str(theirs))
    assert as_nobody(lambda: sorted(kept_elsewhere(tmp_path))) == sorted(VARIABLES)


@pytest.mark.usefixtures("root")
def test_a_notebook_runs_without_a_home(write_notebook, a_file: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HOME", str(a_file / "own"))
    write_notebook(
        "01_draws",
        "import matplotlib, os\nprint(matplotlib.get_configdir(), os.environ['JUPYTER_RUNTIME_DIR'])",
    )
    assert main(["run"]) == 0, capsys.readouterr()
    text = (paths.EXECUTED / "quick" / "01_draws.ipynb").read_text(encoding="utf-8")
    own = paths.CACHE / "home"
    assert f"{own / 'mpl'} {own / 'jupyter'}" in text
