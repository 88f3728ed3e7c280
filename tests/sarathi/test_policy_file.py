"""Schedulers in files of the reader's own: those that run, and every way to do it wrong, in one line that names it."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.sarathi.capacity import STRICT
from firsttoken.sarathi.checked_scheduler import watched
from firsttoken.sarathi.policy import Policy
from firsttoken.simulation.costs.sarathi_artifact import BatchCosts
from firsttoken.simulation.hardware import Hardware
from firsttoken.study import paths, policy_file
from firsttoken.study.errors import ProfileError
from firsttoken.study.policy_file import Decisions
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig

HEAD = """from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.engine.request import ScheduledChunk


class Mine(Scheduler):
    name = "mine"

    def schedule(self):
"""
README = (paths.ROOT / "lib" / "firsttoken" / "engine" / "README.md").read_text(encoding="utf-8")
MINE = next(block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "class Mine" in block)

Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a policy file of this text; its path."""

    def written(text: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return str(path)

    return written


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Ten requests of 30 to 48 and 8 tokens, on the published batch times."""
    table = tmp_path / "lengths.csv"
    table.write_text("num_prefill_tokens,num_decode_tokens\n" + "".join(f"{30 + 2 * i},8\n" for i in range(10)))
    config = CapacityConfig(
        lengths=str(table),
        requests=10,
        seeds=1,
        batch=4,
        start=1.0,
        schedulers=(),
        objectives=(STRICT,),
        ablation=(),
        rate=1.0,
    )
    return Bench(config, Hardware("yi-34b-a100", layers=60, blocks=200, decodes=1, context=64))


def served(bench: Bench, text: str) -> list[Request]:
    return bench.run(Policy.named(text), bench.objective(STRICT), 0, 5.0)[0]


def test_the_policy_of_the_readme_runs_as_the_one_that_is_there(write: Write, bench: Bench) -> None:
    mine = served(bench, write(MINE) + " 64")
    assert [one.times_s for one in mine] == [one.times_s for one in served(bench, "sarathi 64")]
    assert not (Path(write("")).parent / "__pycache__").exists(), "nothing is left beside the reader's file"


def test_the_policy_of_contributing_runs_as_half_of_the_budget(write: Write, bench: Bench) -> None:
    page = (paths.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    halved = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class Halved" in block)
    there = [one.times_s for one in served(bench, "sarathi 32")]
    assert [one.times_s for one in served(bench, write(halved) + " 64")] == there


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Mine(Scheduler: pass", r"mine\.py, line 1: SyntaxError: "),
        ("\nimport nowhere_at_all", r"mine\.py, line 2: ModuleNotFoundError: No module named 'nowhere_at_all'; mend"),
        ("x = 1", r"mine\.py: defines no scheduler; write a subclass of firsttoken.*Scheduler"),
        ("from firsttoken.engine.schedulers.sarathi import Sarathi", "defines no scheduler"),
        (HEAD.partition("    def")[0], "Mine has no method schedule"),
        (MINE + "\n\nclass Yours(Mine):\n    name = 'yours'\n", "defines Mine, Yours; one scheduler a file"),
    ],
)
def test_files_that_hold_no_policy(write: Write, text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Policy.named(write(text))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ProfileError, match=r"there is no policy file nowhere\.py"):
        Policy.named("nowhere.py 512")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("return [self.chunk(self.waiting[0])]", "a step for request 0, which is not running; admit it first"),
        ("works = self.prefills(); return works + works", "request 0 is twice in a step"),
        ("return self.prefills()", r"a step of \d+ tokens with a budget of 16; name what it needs, as in '.*mine.py"),
        (
            "self.admit(); return [self.chunk(one, min(one.remaining, 4)) for one in self.running]",
            r"request \d would have (33|49) tokens and has blocks for (32|48)",
        ),
        (
            "return [ScheduledChunk(self.admit(), 5, 9, 0)]",
            r"tokens 5 to 8 of request 0, whose next is 0 of \d+; make chunks by",
        ),
        ("return [self.chunk(self.admit(), 0)]", "tokens 0 to -1 of request 0"),
        ("return None", "schedule must return a list of what self.chunk gives"),
        ("return [1]", "schedule must return a list of what self.chunk gives"),
        ("return self.nothing", r"mine\.py, line 9: AttributeError: 'Mine' object has no attribute 'nothing'; mend"),
        ("self.running = None; return []", "mine.py"),
    ],
)
def test_steps_that_may_not_be(write: Write, bench: Bench, schedule: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as stopped:
        served(bench, write(f"{HEAD}        {schedule}\n") + " 16")
    assert "mine.py" in str(stopped.value) and "\n" not in str(stopped.value)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("return []", "never finishes: requests are open, and the scheduler runs none of them"),
        ("while True: pass", "never finishes: a decision takes more than 1 s"),
        (
            "while True:\n            try: [] + []\n            except Exception: pass",
            "never finishes: a decision takes more than 1 s",
        ),
        (
            "for one in list(self.running): self.preempt(one)\n        return [self.chunk(self.admit(), 1)]",
            r"never finishes: [\d,]+ tokens processed since a request ended",
        ),
        (
            "if self.running: self.preempt(self.running[0])\n        else: self.admit()\n        return []",
            "never finishes: 1,000 steps in a row without work",
        ),
    ],
)
def test_policies_that_never_finish_anything(
    write: Write, bench: Bench, monkeypatch: pytest.MonkeyPatch, schedule: str, message: str
) -> None:
    monkeypatch.setattr(policy_file, "LONGEST_S", 1.0 if "while" in schedule else 20.0)
    with pytest.raises(ProfileError, match=message) as stopped:
        served(bench, write(f"{HEAD}        {schedule}\n") + " 64")
    assert "mine.py" in str(stopped.value)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    "raised", ["KeyboardInterrupt", "RecursionError", "MemoryError", "SystemExit", "GeneratorExit"]
)
def test_whatever_a_file_raises_is_its_error(write: Write, bench: Bench, raised: str, inside: bool) -> None:
    line = HEAD.count("\n") + 1 if inside else 1
    file = write(f"{HEAD}        raise {raised}(7)\n" if inside else f"raise {raised}(7)\n")
    with pytest.raises(ProfileError, match=rf"mine.py, line {line}: {raised}: 7; mend the policy"):
        served(bench, file + " 64" if inside else file)


def test_ctrl_c_during_a_decision_ends_the_command(write: Write, bench: Bench) -> None:
    # tests that run in the background of a shell ignore SIGINT
    found, before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.default_int_handler
    try:
        with pytest.raises(KeyboardInterrupt):
            served(bench, write(f"import signal\n{HEAD}        signal.raise_signal(signal.SIGINT)\n") + " 64")
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, found)


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 12), st.floats(0, 3)), min_size=1, max_size=12),
    scheduler=st.sampled_from(sorted(SCHEDULERS)),
    spare=st.integers(0, 12),
)
def test_whoever_keeps_the_rules_is_left_alone(asked: list, scheduler: str, spare: int) -> None:
    """Every scheduler that is there, with preemptions."""
    kind = watched(SCHEDULERS[scheduler], Path("mine.py"), Decisions())
    blocks = max(-(-(prompt + new) // 4) for prompt, new, _ in asked) + spare
    config = EngineConfig(scheduler=kind, requests=4, token_budget=400, prefill_tokens=60, watermark=0.0, tbt_s=0.2)
    engine = Engine(SimulatedExecutor(BatchCosts(), blocks, block_tokens=4), config)
    requests = engine.serve([([0] * prompt, Sampling(new), at_s) for prompt, new, at_s in asked])
    assert [len(request.times_s) for request in requests] == [new for _, new, _ in asked]
