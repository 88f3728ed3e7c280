"""The locks say the same everywhere, and nothing of the machine that made them."""

from __future__ import annotations

import re
import tomllib
from itertools import chain

from firsttoken.assets.lock import load_lock
from firsttoken.study import paths


def lines(name: str) -> list[str]:
    """The lines of a file in env/ that are no comments."""
    texts = (paths.ENV / name).read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in texts if line.strip() and not line.startswith("#")]


def package(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


def test_requirements_are_those_of_pyproject():
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())]
    assert {package(line) for line in lines("requirements.in")} == {package(line) for line in wanted} | {"setuptools"}


def test_every_requirement_is_locked_to_one_version_without_a_place():
    pinned = re.compile(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*(; (python_version|platform_system) == \"[\w.]+\")?")
    locked = lines("requirements.lock")
    assert [line for line in locked if not pinned.fullmatch(line)] == []
    names = [package(line) for line in locked]
    assert len(names) == len(set(names))
    assert {package(line) for line in lines("requirements.in")} <= set(names)


def test_every_direct_requirement_has_its_reason():
    reasons = (paths.ENV / "README.md").read_text(encoding="utf-8").split("## Why each dependency")[1]
    listed = {package(name) for row in re.findall(r"^\| ([^|]+) \|", reasons, re.M) for name in row.split(", ")}
    assert {package(line) for line in lines("requirements.in")} <= listed


def test_the_data_readme_gives_the_size_and_hash_of_every_asset():
    readme = (paths.DATA / "README.md").read_text(encoding="utf-8")
    for asset in load_lock():
        for name, entry in ((asset.file, asset), *((member.saved_as, member) for member in asset.members)):
            assert f"| `{name}` | {entry.bytes:,} | `{entry.sha256}` |" in readme
