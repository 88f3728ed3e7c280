"""Policies of the reader's own: those of CONTRIBUTING.md run, and every way to do it wrong is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from firsttoken.__main__ import main
from firsttoken.assets.lock import load_lock
from firsttoken.engine.preemption import PREEMPTION
from firsttoken.engine.preemption.resume import RESUME
from firsttoken.engine.preemption.victims import VICTIM, VICTIMS
from firsttoken.petals.routing import Reachable
from firsttoken.sarathi.policy import SCHEDULER
from firsttoken.study import paths, policy_file
from firsttoken.study.errors import ProfileError
from firsttoken.study.policy_file import PolicyFile, PolicyKind
from firsttoken_studies.trying import KINDS, transition
from firsttoken_studies.trying.layers import LAYERS, turned
from firsttoken_studies.trying.placement import PLACEMENT
from firsttoken_studies.trying.table import TrialTable
from firsttoken_studies.trying.transition import TRANSITION

PAGE = (paths.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"`firsttoken try (\w+) mine\.py`[^#]*?```python\n(.*?)```", PAGE, re.DOTALL))
TINY = {
    "scheduler": ["capacity.requests=12"],
    "preemption": ["replayed.short=6", "replayed.long=6", "replayed.blocks=160"],
    "victim": ["replayed.short=6", "replayed.long=6", "replayed.blocks=160"],
    "resume": ["replayed.short=6", "replayed.long=6", "replayed.blocks=160"],
    "placement": ["churn.servers=10", "churn.depth=12", "churn.events=1"],
    "layers": ["distance.tokens=16"],
}
VIEW = SimpleNamespace(layers=[1, 2, 3])
SERVER = Reachable("a", range(2), 0.0, 1.0)
ASKED: dict[str, tuple[PolicyKind, str, Callable]] = {  # a file with a body to fill in, and how it is asked
    "preemption": (
        PREEMPTION,
        "from firsttoken.engine.preemption import PreemptionPolicy\n"
        "class Mine(PreemptionPolicy):\n    def choose(self, *asked):\n        {}",
        lambda mine: mine().choose(100, 0.0),
    ),
    "victim": (VICTIM, "def mine(*asked):\n    {}", lambda mine: mine([object()])),
    "resume": (RESUME, "def mine(*asked):\n    {}", lambda mine: mine(object())),
    "transition": (
        TRANSITION,
        "from firsttoken.progressiveserve.staged_serving.transitions import Transition\n"
        "class Mine(Transition):\n    def redo(self, *asked):\n        {}",
        lambda mine: mine().redo(VIEW, VIEW),
    ),
    "placement": (
        PLACEMENT,
        "from firsttoken.petals.placement import Rebalancing\n"
        "class Mine(Rebalancing):\n    def move(self, *asked):\n        {}",
        lambda mine: mine().move("a", [SERVER], 4),
    ),
    "layers": (LAYERS, "def mine(*asked):\n    {}", lambda mine: mine(SimpleNamespace(depth=4), 2)),
}
STAYS = {"transition", "placement"}  # whose None is an answer


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a policy file of this text."""

    def written(text: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return written


def run(kind: str, file: Path | str, *more: str) -> int:
    sets = [word for one in TINY.get(kind, []) for word in ("--set", one)]
    return main(["try", kind, str(file), "--draws", "1", *sets, *more])


def test_every_kind_has_an_example() -> None:
    assert EXAMPLES.keys() == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_of_the_page_run_beside_their_siblings(
    write, capsys, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    needs = {"scheduler", "preemption", "victim", "resume", "layers"}
    if kind in needs and any(asset.missing() for asset in load_lock()):
        pytest.skip("assets are not fetched; run `firsttoken fetch`")
    monkeypatch.setattr(transition, "TOKENS", 32)
    file = write(EXAMPLES[kind])
    assert run(kind, file) == 0
    setting, _, table = capsys.readouterr().out.partition("n = 1 draws")
    _, _, heads, mine, *siblings = table.splitlines()
    assert setting and "  " in heads.strip()
    assert mine.startswith(f"> {file}") and len(siblings) >= 3 and not any(one.startswith(">") for one in siblings)
    if kind == "scheduler":
        assert run(kind, file, "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["yours"] == str(file) and len(found["policies"]) == len(siblings) + 1


def test_the_table() -> None:
    rows = {"mine.py": [{"s": v, "ms": 5.0} for v in (1, 2, 3, 4, 5)], "usual": [{"s": 10.0, "ms": 50.0}] * 5}
    assert TrialTable("a setting", rows).told().splitlines() == [
        "a setting",
        "n = 5 draws, the same for all; mean [95 % interval]; > is yours",
        "",
        "                        s    ms",
        "> mine.py  3.0 [1.0, 5.0]   5.0",
        "  usual              10.0  50.0",
    ]


def test_an_interval_of_few_draws_ends_where_its_quantity_does() -> None:
    rows = {
        "mine.py": [
            {"within, %": share, "s": second}
            for share, second in zip((0, 0, 100, 100, 0), (0, 0, 0, 0, 9), strict=True)
        ]
    }
    (line,) = [line for line in TrialTable("a setting", rows).told().splitlines() if line.startswith(">")]
    assert line.split("mine.py")[1].split("]")[:2] == ["  40 [0, 100", "  1.80 [0.00, 6.80"]


def test_layers_in_several_runs_turn_the_stream_by_their_sum() -> None:
    import torch

    distances = SimpleNamespace(depth=4, last_token=torch.arange(25.0).view(1, 5, 5))
    assert turned(distances, [0, 1, 3]) == 2.0 + 19.0 and turned(distances, []) == 0


@pytest.mark.parametrize("kind", [SCHEDULER, *(kind for kind, *_ in ASKED.values())], ids=lambda kind: kind.label)
def test_files_that_hold_no_policy(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: PolicyKind) -> None:
    name = kind.label
    if kind.base is None:
        one, two = "def mine(*asked): pass\n", "def mine(*asked): pass\ndef yours(*asked): pass\n"
    else:
        methods = "".join(
            f"    def {method}(self, *asked): pass\n" for method in getattr(kind.base, "__abstractmethods__", ["m"])
        )
        head = f"from {kind.base.__module__} import {kind.base.__name__} as Base\n"
        one = f"{head}class Mine(Base):\n{methods}"
        two = f"{one}class Yours(Base):\n{methods}"
    assert PolicyFile.read(write(one), kind).policy.__name__.lower() == "mine"
    for text, message in (
        (two, rf"mine\.py: defines (M|m)ine, (Y|y)ours; one {name} a file"),
        ("x = 1", rf"mine\.py: defines no {name}; {re.escape(kind.mend)}"),
        ("def (", r"mine\.py, line 1: SyntaxError: .*; mend the policy"),
        ("raise ValueError(7)", r"mine\.py, line 1: ValueError: 7; mend the policy"),
        ("while True: pass", r"mine\.py: never finishes: a decision takes more than 0\.2 s"),
    ):
        monkeypatch.setattr(policy_file, "LONGEST_S", 0.2 if "while" in text else 20.0)
        with pytest.raises(ProfileError, match=message):
            PolicyFile.read(write(text), kind)
    with pytest.raises(ProfileError, match=f"is a folder, no policy file; give a {name}'s name or a path"):
        PolicyFile.read(tmp_path, kind)
    with pytest.raises(ProfileError, match=r"there is no policy file .*nowhere\.py"):
        PolicyFile.read(tmp_path / "nowhere.py", kind)


@pytest.mark.parametrize("kind", ASKED)
def test_what_a_policy_may_not_do(write, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    described, text, ask = ASKED[kind]
    line = text.count("\n") + 1
    for body, message in (
        ("while True: pass", r"mine\.py: never finishes: a decision takes more than 0\.2 s; mend it"),
        ("raise ValueError(7)", rf"mine\.py, line {line}: ValueError: 7; mend the policy"),
        ("return 'swap'", r"mine\.py: .*(must|return).*not 'swap'"),
        ("return [-1, 7]", r"mine\.py: .*(must|return).*not \[-1, 7\]"),
        ("return None", r"mine\.py: .*(must|return).*not None"),
    ):
        file = PolicyFile.read(write(text.replace("{}", body)), described)
        monkeypatch.setattr(policy_file, "LONGEST_S", 0.2 if "while" in body else 20.0)
        if kind in STAYS and body == "return None":
            assert ask(file.watched()) is None
            continue
        with pytest.raises(ProfileError, match=message) as stopped, file.judged():
            ask(file.watched())
        assert "\n" not in str(stopped.value)


def test_what_the_engine_refuses_names_the_file(write, capsys) -> None:
    """A layer whose input was never kept, and a victim that is always the same."""
    head = "from firsttoken.progressiveserve.staged_serving.transitions import Transition\n"
    redo = "class Mine(Transition):\n    def redo(self, old, new):\n        return range(6, 8)\n"
    assert run("transition", write(head + redo)) == 2
    (line,) = [one for one in capsys.readouterr().err.splitlines() if one.startswith("firsttoken: ")]
    assert "mine.py: " in line


def test_a_command_that_cannot_be(write, tmp_path: Path, capsys) -> None:
    for kind in KINDS:
        assert run(kind, tmp_path / "nowhere.py") == 2
        assert "there is no policy file" in capsys.readouterr().err
    assert run("victim", write("x = 1"), "--set", "machine.nothing=1") == 2
    for words in (["cache", "mine.py"], ["victim"], ["victim", "mine.py", "--draws", "0"]):
        with pytest.raises(SystemExit) as ended:
            main(["try", *words])
        assert ended.value.code == 2
    assert {"last_arrived", "first_arrived", "longest", "shortest"} <= set(VICTIMS)
