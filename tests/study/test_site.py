"""The site: every link leads to a page of it, no page asks a network, every picture has words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from firsttoken.study import paths, policy_file
from firsttoken.study.errors import StorageError
from firsttoken_studies.record.notebooks import notebook_paths
from firsttoken_studies.site import build as site
from firsttoken_studies.site import scheduler_page
from firsttoken_studies.site.build import body, described, plain, with_links
from firsttoken_studies.site.scheduler_scene import SchedulerScene, _p99, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("out") / "site"
    made.mkdir()
    (made / "site.css").write_text("of an earlier site", encoding="utf-8")  # which is written over
    assert site.build(made) < 20e6
    return made


def test_every_notebook_has_a_page_with_a_finding_and_minutes(folder):
    index = (folder / "index.html").read_text(encoding="utf-8")
    for path in notebook_paths():
        page = described(path)
        assert (folder / page.name).exists() and f'href="{page.name}"' in index
        assert len(page.finding) > 20 and "minutes" in page.minutes


def test_every_notebook_stands_in_one_group():
    grouped = [number for numbers in site.GROUPS.values() for number in numbers]
    assert sorted(grouped) == [path.name[:2] for path in notebook_paths()]


def test_no_link_is_broken_and_none_leads_to_a_network(folder):
    for page in folder.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        asked = re.findall(r'(?:href|src)="(?!data:|#)([^"]*)"', text)
        assert [link for link in asked if not (folder / link.partition("#")[0]).exists()] == [], page.name
        assert not re.search(r"@import|url\(http|<script[^>]+https?:", text), page.name


def test_a_link_into_a_page_leads_to_a_place_of_it(folder):
    led = set()
    for page in folder.glob("*.html"):
        for target, place in re.findall(r'href="([^"#:]+\.html)#([^"]+)"', page.read_text(encoding="utf-8")):
            assert f'id="{place}"' in (folder / target).read_text(encoding="utf-8"), f"{page.name}: {target}#{place}"
            led.add((target, place))
    assert ("01_the_first_token.html", "Words") in led


def test_every_picture_has_words(folder):
    for page in folder.glob("*.html"):
        pictures = re.findall(r"<img[^>]*>", page.read_text(encoding="utf-8"))
        assert [one[:80] for one in pictures if not re.search(r'alt="[^"]{10,}', one)] == [], page.name


def test_equations_are_mathml(folder):
    first = (folder / "01_the_first_token.html").read_text(encoding="utf-8")
    assert first.count("<math") >= 3 and "$$" not in first


def test_claims_carry_what_their_filters_ask(folder):
    text = (folder / "claims.html").read_text(encoding="utf-8")
    rows = re.findall(r"<tr data-report=\"([^\"]+)\" data-whose=\"([^\"]+)\" data-ground=\"([^\"]+)\"", text)
    assert len(rows) > 150 and {whose for _, whose, _ in rows} == {"report", "project"}


def test_the_page_of_the_ideas_says_where_each_was_measured(folder):
    text = (folder / "tricks.html").read_text(encoding="utf-8")
    assert text.count("as it was recorded") == text.count("<section data-idea=") == text.count("Price: ") == 5
    assert "prompt: " in text and '"13": "13_cold_start.html"' in text
    assert (folder / "runs.js").read_text(encoding="utf-8").count('"at"') > 20


def test_a_link_out_of_the_site_is_words_alone():
    html = '<a href="11_x.ipynb#y">eleven</a> <a href="../lib/firsttoken/a.py">code</a> <a href="#words">up</a>'
    made = with_links(html, {"11_x.ipynb": "11_x.html"})
    assert made == '<a href="11_x.html#y">eleven</a> code <a href="#words">up</a>'


def test_words_lose_their_marks():
    assert plain("> **What** it is: [11](x.ipynb), `code`") == "What it is: 11, code"


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("kept", encoding="utf-8")
    with pytest.raises(StorageError, match="name an empty folder"):
        site.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_code_that_looks_like_an_equation_stays(tmp_path):
    cell = {"cell_type": "markdown", "id": "a", "metadata": {}, "source": "# t\n`$x$` and $y$ cost $3 and $4"}
    path = tmp_path / "00_t.ipynb"
    content = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(content), encoding="utf-8")
    made = body(path)
    assert "<code>$x$</code>" in made and made.count("<math") == 1 and "cost $3 and $4" in made


SCENE = asdict(SchedulerScene(((0.0, 900, 20), (0.1, 40, 30), (0.2, 1200, 3)), 200, 128, 0.2))
BARE = """
import json, sys
sys.path.insert(0, sys.argv[1])
from firsttoken_studies.site.scheduler_scene import told
print(json.dumps([told(json.loads(sys.argv[2]), name) for name in sys.argv[3:]]))
print(*sys.modules)
"""


def test_the_librarys_modules_serve_where_nothing_is_installed(tmp_path):
    """By the same numbers: three schedulers, and the policy with which the page begins."""
    (tmp_path / "library.zip").write_bytes(scheduler_page.library())
    (tmp_path / "mine.py").write_text(scheduler_page.POLICY, encoding="utf-8")
    names = [*scheduler_page.SIBLINGS, str(tmp_path / "mine.py")]
    command = [sys.executable, "-I", "-S", "-c", BARE, str(tmp_path / "library.zip"), json.dumps(SCENE), *names]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    rows, imported = run.stdout.splitlines()
    assert json.loads(rows) == [told(SCENE, name) for name in names] and "error" not in rows
    assert not {"numpy", "torch", "yaml", "tqdm"} & set(imported.split())


def test_what_a_browser_lacks_is_not_packed():
    with pytest.raises(subprocess.CalledProcessError) as failed:
        scheduler_page.modules("firsttoken_studies.nb41_serving_capacity.bench")
    assert "numpy is not in the browser" in failed.value.stderr


def test_the_p99_is_numpys():
    draw = np.random.default_rng(1)
    for count in (2, 7, 100, 1000):
        values = draw.exponential(size=count).tolist()
        assert _p99(values) == pytest.approx(float(np.percentile(values, 99)), rel=1e-12)


def test_a_browser_bounds_no_decision(monkeypatch):
    """It cannot start a thread; elsewhere one is started."""
    monkeypatch.setattr(policy_file.threading, "Thread", None)
    with pytest.raises(TypeError), policy_file.bounded(policy_file.Decisions(), "mine.py"):
        pass
    monkeypatch.setattr(policy_file.sys, "platform", "emscripten")
    with policy_file.bounded(policy_file.Decisions(), "mine.py"):
        pass


def test_the_site_says_why_no_scheduler_is_written_in_it(tmp_path, monkeypatch):
    """And the page of an earlier site is taken away."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    page = tmp_path / "scheduler.html"
    page.write_text("of an earlier site", encoding="utf-8")
    lacking = site._scheduler(tmp_path, [described(path) for path in notebook_paths()])
    assert re.fullmatch(r"pyodide@\S+ is not in the cache, and firsttoken fetch pyodide brings it", lacking)
    assert list(tmp_path.iterdir()) == []


def test_the_index_leads_to_the_scheduler_or_says_what_lacks(folder):
    index = (folder / "index.html").read_text(encoding="utf-8")
    there = [(folder / name).exists() for name in ("scheduler.html", "scheduler-data.js")]
    assert there == [index.count("is written is missing here (") == 0] * 2 == ['href="scheduler.html"' in index] * 2
