"""What is typed of an option is its whole name; another program's name for it, or a near one, leads to it in a line."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from firsttoken.__main__ import COMMANDS, main
from firsttoken.assets.checkpoint import hub_folder
from firsttoken.assets.model_config import check_folder
from firsttoken.options import parser
from firsttoken.study.command_line import CommandLine
from firsttoken.study.errors import ModelError
from firsttoken_serve.service_config import ELSEWHERE


def every(made: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield made
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            for added in action.choices.values():
                yield from every(added)


PARSERS = list(every(parser(COMMANDS)))


def test_no_command_takes_abbreviations():
    assert len(PARSERS) > 20 and all(isinstance(one, CommandLine) and not one.allow_abbrev for one in PARSERS)


@pytest.mark.parametrize("made", PARSERS, ids=lambda made: made.prog)
def test_an_option_cut_short_or_mistyped_is_one_line_that_names_it(made, capsys):
    if made._subparsers is not None:
        return
    for option in [option for option in made._option_string_actions if option.startswith("--") and option != "--help"]:
        for typed in {option[:-1], option + "x"} - made._option_string_actions.keys():
            with pytest.raises(SystemExit) as ended:
                made.parse_args([typed, "1"])
            line = capsys.readouterr().err
            assert ended.value.code == 2 and line.count("\n") == 1 and f"no option {typed}; did you mean --" in line


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("serve --api-key x", "serve: no option --api-key: others can read a command line: name a file by --api-key-"),
        ("serve --max-num-seqs=8", "serve: no option --max-num-seqs: it is called --max-running here; see `firsttoken"),
        ("serve -hf a/b", "serve: no option -hf: download it first: `hf download ORG/NAME`"),
        ("serve --model m", "serve: no option --model: the folder stands by itself: `firsttoken serve FOLDER`"),
        ("serve --xyzzy", "serve: no option --xyzzy; see `firsttoken serve --help`"),
        ("serve a b", "serve: 'b' is one word too many; see"),
        ("serve --port", "serve: argument --port: expected one argument"),
        ("swarm serve --modle m", "swarm serve: no option --modle; did you mean --model?"),
        ("--profile quick run", "no option --profile; see `firsttoken --help`"),
        ("srve", "argument COMMAND: no 'srve'; known: .* \\(did you mean 'serve'\\?\\)"),
    ],
)
def test_what_is_wrong_with_a_command_line_is_one_line(typed, line, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(typed))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1
    assert re.match(rf"firsttoken:? ?{line}", said), said


def test_what_is_had_elsewhere_by_another_name_is_had_here_by_the_one_that_is_said(capsys):
    (serve,) = [one for one in PARSERS if one.prog == "firsttoken serve"]
    assert not ELSEWHERE.keys() & serve._option_string_actions.keys()
    for name, instead in ELSEWHERE.items():
        with pytest.raises(SystemExit):
            serve.parse_args([name, "1"])
        assert (instead if instead[:2] != "--" else f"it is called {instead} here") in capsys.readouterr().err
        assert instead[:2] != "--" or instead.split()[0] in serve._option_string_actions


def test_a_model_of_the_hub_is_downloaded_or_found_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with pytest.raises(ModelError, match=r"if it is on the Hub, run `hf download org/a-1\.5b` and try again"):
        check_folder(Path("org/a-1.5b").resolve())
    snapshot = tmp_path / "hf" / "hub" / "models--org--a-1.5b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    with pytest.raises(ModelError, match=f"the Hub's cache has this model: name {snapshot}"):
        check_folder(Path("org/a-1.5b"))
    with pytest.raises(ModelError, match=r"has org/a-1\.5b in part: .*; `hf download org/a-1\.5b` brings the rest$"):
        hub_folder(Path("org/a-1.5b"))
    for name in ("nowhere", "a/b/c", "../a/b", "hf/b", "~x/b", "a" * 5000):
        with pytest.raises(ModelError, match=r"give a folder with config\.json"):
            check_folder(Path(name))
