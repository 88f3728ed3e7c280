"""The site: every link leads to a page of it, no page asks a network, every picture has words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from firsttoken.study.errors import StorageError
from firsttoken_studies.record.notebooks import notebook_paths
from firsttoken_studies.site import build as site
from firsttoken_studies.site.build import body, described, plain, with_links


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
