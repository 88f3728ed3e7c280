"""What a page says to type runs as it stands: its Python, its commands, the routes that it names."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from starlette.routing import Match
from swarms import DEPTH, Here

from firsttoken.__main__ import COMMANDS
from firsttoken.assets.models import load_model
from firsttoken.options import parser
from firsttoken.petals.local_swarm import varied_model
from firsttoken.progressiveserve.checkpoint.sources import ModelSource, Origin
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.study import paths
from firsttoken_extras.layer_borrowing.embeddings import ends_first
from firsttoken_serve.http.app import build_app
from firsttoken_serve.service_config import ServiceConfig
from firsttoken_studies.record.notebooks import notebook_paths

ROOMS = ("lib", "env", "data")
PAGES = {
    page.relative_to(paths.ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in [*paths.ROOT.glob("*.md"), *(page for room in ROOMS for page in (paths.ROOT / room).rglob("*.md"))]
}
PROGRAMS = {page: blocks for page, text in PAGES.items() if (blocks := re.findall(r"```python\n(.*?)```", text, re.S))}
"""The Python of each page: a block goes on from those before it."""
SHELL = [
    (page, line.strip())
    for page, text in PAGES.items()
    for block in re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", text, re.S)
    for line in block.replace("\\\n", " ").splitlines()
]
PROTOCOLS = {
    "OpenAI": ("/v1/models", "/v1/completions", "/v1/chat/completions"),
    "llama.cpp": ("/completion", "/tokenize", "/props"),
    "Ollama": ("/api/generate", "/api/chat"),
    "Anthropic": ("/v1/messages",),
}


def test_the_python_of_a_page_has_its_names(tmp_path: Path) -> None:
    assert len(PROGRAMS) >= 7
    for number, (page, blocks) in enumerate(PROGRAMS.items()):
        text = f"# {page}\n" + "\n".join(blocks)
        compile(text, page, "exec")
        (tmp_path / f"page{number}.py").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823", "--output-format", "full"]
    ran = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("page", PROGRAMS)
def test_what_the_python_of_a_page_imports_is_there(page: str) -> None:
    for node in ast.walk(ast.parse("\n".join(PROGRAMS[page]))):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert [one.name for one in node.names if not hasattr(module, one.name)] == [], node.module


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    """Servers of a tiny model that is staged with its ends first."""
    folder, model = tmp_path_factory.mktemp("pages") / "tiny", varied_model(head_dim=16)
    source = ModelSource(model, None, Origin("random", None, "random"))
    write_staged(source, ends_first(source.names, DEPTH), folder)
    here = Here(folder)
    yield here
    here.close()


def small(spec: str, **_: object) -> SimpleNamespace:
    """Random weights in the place of a model that a page names."""
    if spec.startswith("random:"):
        return load_model(spec)
    tokenizer = MagicMock(return_value={"input_ids": [5, 6, 7, 8]})
    tokenizer.decode = str
    return SimpleNamespace(model=load_model("random:tiny-8").model, tokenizer=tokenizer)


@pytest.mark.parametrize("page", [page for page in PROGRAMS if "combined" not in page])  # of 30 layers, by processes
def test_the_python_of_a_page_runs(page: str, staged: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = PROGRAMS[page]
    text = re.sub(r"\b15\b", "4", re.sub(r"\b30\b", "8", "\n".join(blocks)))  # a model of 8 layers for one of 30
    text = text.replace('"FOLDER"', repr(str(staged.folder)))  # behind it: pytest's own folder may be its thirtieth
    if "127.0.0.1:4000" in text:
        (up,) = staged.serve((0, DEPTH), trains=True)
        text = text.replace("127.0.0.1:4000", up.record.address)
    monkeypatch.setattr("firsttoken.assets.models.load_model", small)
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(compile(text, page, "exec"), {"__name__": page})


def chosen(words: list[str]) -> argparse.ArgumentParser:
    """The parser of the command, or of its action, that ``words`` name."""
    made = parser(COMMANDS)
    for word in words:
        actions = [action for action in made._actions if isinstance(action, argparse._SubParsersAction)]
        if actions:
            made = actions[0].choices[word]
    return made


def test_the_commands_of_the_pages_are_taken() -> None:
    """Other programs than those of this clone are known by name."""
    program, seen = parser(COMMANDS), Counter[str]()
    project = (paths.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for page, line in SHELL:
        for part in line.partition(" #")[0].split("&&"):
            name, _, rest = part.strip().partition(" ")
            seen[name] += 1
            if name == "firsttoken" and "EXPERIMENT" not in rest:
                assert program.parse_args(shlex.split(rest)).command, (page, line)
            elif name.endswith(".sh"):
                usage = (paths.ROOT / name).read_text(encoding="utf-8")
                assert all(word in usage for word in rest.split() if word.startswith("-")), (page, line)
            elif name == "pip" and (extra := re.search(r"\[(\w+)\]", rest)):
                assert f"\n{extra[1]} = [" in project and " -e " in part, (page, line)
    others = {"", "pip", "python", "python3", "curl", "conda", "jupyter", ".", "fresh/bin/pip", "firsttoken"}
    assert [name for name in seen.keys() - others if not name.endswith(".sh") and name[0] not in '"{#'] == []
    assert seen["firsttoken"] > 30
    for page, text in PAGES.items():
        named = re.findall(r"`(?:python3? )?((?:tests|env)/[\w./-]+\.(?:py|sh))", text)
        assert [one for one in named if not (paths.ROOT / one).is_file()] == [], page


def helps(made: argparse.ArgumentParser) -> Iterator[str]:
    yield " ".join(made.format_help().split())
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for added in action.choices.values():
                yield from helps(added)


def test_the_examples_of_every_help_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # a line is not broken within an option
    usage = subprocess.run(["bash", str(paths.ROOT / "run_all.sh"), "--help"], capture_output=True, text=True)
    texts = [usage.stdout, *helps(parser(COMMANDS))]
    lines = {line for text in texts for line in re.findall(r"`firsttoken ([a-z][^`]*)`", text)}
    assert lines
    for words in map(shlex.split, lines):
        assert {word for word in words if word[:2] == "--"} <= chosen(words)._option_string_actions.keys(), words
    ways = (r"--only((?: \d\d)+)", r"notebooks to run, such as((?: \d\d)+)")
    numbers = [found.split() for text in texts for way in ways for found in re.findall(way, text)]
    assert len(numbers) >= 3 and all(notebook_paths(some) for some in numbers)


def test_the_routes_and_protocols_that_a_page_names_are_answered() -> None:
    app = build_app(MagicMock(), MagicMock(), ServiceConfig(Path("folder")))

    def answered(path: str) -> bool:
        return any(
            route.matches({"type": "http", "path": path, "method": method})[0] is Match.FULL
            for route in app.routes
            for method in ("GET", "POST")
        )

    assert answered("/v1/models") and not answered("/props")
    named = set()
    for page, text in PAGES.items():
        for both in re.findall(r"([\w.]+)(?:'s)?(?:,? (?:and|or) ([\w.]+))?'s\s+(?:protocol|interface|routes)", text):
            named |= {name for name in both if name in PROTOCOLS}
        routes = re.findall(r"`(?:GET |POST )?(/(?:v1/)?[a-z]\w*(?:/\w+)*)`", text)
        routes += re.findall(r"127\.0\.0\.1:8000(/[\w/]+)", text)
        assert [route for route in routes if not answered(route)] == [], page
    assert "OpenAI" in named
    assert [name for name in named if not all(map(answered, PROTOCOLS[name]))] == []


def test_nobody_is_told_to_install_from_an_index_where_the_name_is_free() -> None:
    files = [*map(paths.ROOT.joinpath, PAGES), *(paths.ROOT / "lib").rglob("*.py"), *paths.NOTEBOOKS.glob("*.ipynb")]
    wrong = re.compile(r"pip3? install (?!.*-e)[^\n`]*\bfirsttoken\b|\bfirsttoken\[[a-z]+\]")
    assert [path.name for path in files if wrong.search(path.read_text(encoding="utf-8"))] == []
