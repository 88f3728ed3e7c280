"""The shape of the house. Its size has a ceiling that is kept outside of this repository (`.ci/run`).

What is not yet where it should be stands in the lists of exceptions; nothing is added to them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict

import pytest
from the_library import circles, floors, imported_anywhere, is_folder, rooms, sources

from firsttoken_studies.record.notebooks import notebook_paths, read_notebook

FLOORS = 8  # modules of a room that stand on each other
IMPORTING = 17  # percent of a room's lines that import
LONGEST = 400  # lines of a file; a study that would be longer is measured in one and drawn in another
SHORTER_THAN_60 = 43  # files of the library, which is a concept that hardly deserves one
NEIGHBOURS = {  # modules that only one neighbour imports, and why they are no part of it
    "firsttoken.droidspeak.tiers": "more than 400 lines together",
    "firsttoken.options": "more than 400 lines together",
    "firsttoken.petals.announcer": "more than 400 lines together",
    "firsttoken_serve.retrying_server": "more than 400 lines together",
    "firsttoken_extras.bitplanes.decode": "imported with the first weights, as a manifest is read before torch",
    "firsttoken_extras.bitplanes.plane_format": "the library finds it by the name of its format",
    "firsttoken_extras.vllm_cross_point.connector": "vLLM names it in its configuration",
    "firsttoken_extras.vllm_cross_point.host": "tested without vLLM",
    "firsttoken_extras.vllm_cross_point.settings": "tested without vLLM",
    "firsttoken_serve.chat.template_renderer": "run by itself, in a process of its own",
    "firsttoken_serve.http.ray_replicas": "imported where replicas are asked for, as Ray is optional",
    "firsttoken_serve.http.neutral": "more than 400 lines together",
    "firsttoken_serve.http.responses": "more than 400 lines together",
}
NEIGHBOURING_STUDIES = 18  # a study whose numbers another file draws, or whose settings another study shares
NO_SUBJECT = 0  # docstrings of one line that the name of the function has to begin
_NO_SUBJECT = re.compile(
    r"(Of|As|By|From|Where|Who|Whose|That|Those|So|Until|At|In|Out|On|For|Behind|Before|After|Beside|None|Also)\b"
)
_CLAUSE = re.compile(r"(What|Who|Which|How|Where|When|Whether|It|Its|They|The same)\b")  # or needs the one above
# words that name nothing: no local and no parameter is called so
PRONOUNS = {
    "one", "found", "told", "said", "asked", "mine", "place", "at", "where", "there", "odd", "here", "known",
    "kept", "whole",
    "what", "of", "own", "ends", "left", "seen", "over", "each", "drawn",
}  # fmt: skip


def lines_of(module: str) -> int:
    return len(sources()[module].splitlines())


@pytest.mark.parametrize("room", rooms())
def test_a_room_has_few_floors_and_few_imports(room: str) -> None:
    modules = rooms()[room]
    nodes = (node for module in modules for node in ast.walk(ast.parse(sources()[module])))
    importing = sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )
    assert floors(modules, imported_anywhere()) <= FLOORS
    assert 100 * importing / sum(map(lines_of, modules)) <= IMPORTING


def test_nothing_leads_back_to_itself() -> None:
    """Imports for type checkers and within functions are counted."""
    assert circles(imported_anywhere()) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [{"b", "c"}]


def test_no_file_name_stands_for_two_things() -> None:
    files = (module for module in sources() if module.startswith("firsttoken.") and not is_folder(module))
    assert [leaf for leaf, times in Counter(map(_leaf, files)).items() if times > 1] == []


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def test_files_are_neither_long_nor_many_of_them_short() -> None:
    assert [m for m in sources() if lines_of(m) > LONGEST] == []
    short = [m for m in sources() if m.startswith("firsttoken.") and lines_of(m) < 60 and not is_folder(m)]
    assert len(short) <= SHORTER_THAN_60


def test_what_one_neighbour_uses_is_part_of_it() -> None:
    users = defaultdict[str, set[str]](set)
    for module, others in imported_anywhere().items():
        for other in others:
            users[other].add(module)
    alone = {one for one, by in users.items() if len(by) == 1 and _folder(one) == _folder(next(iter(by)))}
    # of a notebook's folder the figures use the study, which is how such a folder is made
    drawn_from = {one for one in alone if _leaf(next(iter(users[one]))) == "figures"}
    studies = {one for one in alone - drawn_from if one.startswith("firsttoken_studies")}
    assert alone - drawn_from - studies == set(NEIGHBOURS)
    assert len(studies) <= NEIGHBOURING_STUDIES


def _folder(module: str) -> str:
    return module.rpartition(".")[0]


def test_docstrings_have_a_subject() -> None:
    """Read alone, without the name above it."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = (node for source in sources().values() for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    said = [text for node in nodes if (text := ast.get_docstring(node)) and "\n" not in text]
    assert len([text for text in said if _NO_SUBJECT.match(text) or len(text.split()) <= 2]) <= NO_SUBJECT
    texts = (
        ast.get_docstring(node)
        for source in sources().values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds)
    )
    assert [text.splitlines()[0] for text in texts if text and _CLAUSE.match(text)] == []


def bound(tree: ast.AST) -> set[str]:
    """Return the names that a module binds as locals and parameters. Fields of classes are none: files and messages are
    written with them."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(target) for node in classes for line in node.body if isinstance(line, ast.Assign | ast.AnnAssign)
              for target in ast.walk(line)}  # fmt: skip
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    names = {node.id for node in stored if id(node) not in fields}
    return names | {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}


def test_locals_and_parameters_have_names() -> None:
    """In the library, the studies and the notebooks' cells."""
    cells = {
        path.name: "\n".join(
            "".join(cell["source"]) for cell in read_notebook(path)["cells"] if cell["cell_type"] == "code"
        )
        for path in notebook_paths()
    }
    texts = sources() | cells
    assert [f"{name}: {word}" for name, text in texts.items() for word in PRONOUNS & bound(ast.parse(text))] == []
