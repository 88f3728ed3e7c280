"""The site in a headless browser, as wide as a desk and a telephone: nothing fails, filters and policies work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsers import visiting
from started import PYTHON, ROOT

pytestmark = pytest.mark.skipif(
    not shutil.which("chromedriver"), reason="no browser here: apt install chromium chromium-driver"
)
pytest.importorskip("selenium", reason="not in .venv-clients: run tests/run.sh --clients")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("out") / "site"
    subprocess.run([PYTHON, "-m", "firsttoken", "site", str(folder)], check=True, cwd=ROOT)
    yield folder


def test_no_page_fails_or_is_wider_than_the_window(site: Path) -> None:
    """With FIRSTTOKEN_SHOTS pictures of the pages are left there."""
    broken = "return [...document.images].filter(image => image.loading != 'lazy' && !image.naturalWidth).length"
    with visiting(f"file://{site}/index.html") as page:
        for path in sorted(site.glob("*.html")):
            page.browser.get(f"file://{path}")
            assert page.browser.execute_script(broken) == 0, path.name
            page.check_widths(f"site-{path.stem}")
            assert page.errors() == [], path.name


def test_the_claims_are_filtered(site: Path) -> None:
    from selenium.webdriver.support.ui import Select

    shown = "[...document.querySelectorAll('#claims tbody tr')].filter(row => !row.hidden)"
    with visiting(f"file://{site}/claims.html") as page:
        everything = page.browser.execute_script(f"return {shown}.length")
        Select(page.browser.find_element("css selector", "select[name=report]")).select_by_index(1)
        reports = page.browser.execute_script(f"return [...new Set(({shown}).map(row => row.dataset.report))]")
        assert reports == ["ProgressiveServe"]
        page.browser.find_element("css selector", "input[name=words]").send_keys("a word that no claim has")
        assert page.browser.execute_script(f"return {shown}.length") == 0
        assert page.browser.find_element("id", "shown").text == f"0 of {everything}"


SITUATIONS = """
import json, random
from firsttoken_studies import tricks
from firsttoken_studies.site.tricks_page import SLIDERS
draw, told = random.Random(1), []
for _ in range(50):
    said = {slider.name: draw.uniform(slider.least, slider.most) for slider in SLIDERS}
    s = tricks.TrickSetting(**said)
    told.append([said, {name: [t for t in idea.formula(s) if t is not None] for name, idea in tricks.IDEAS.items()}])
print(json.dumps(told))
"""


def test_the_page_reckons_as_the_library_does(site: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    made = subprocess.run([PYTHON, "-c", SITUATIONS], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    with visiting(f"file://{site}/tricks.html") as page:
        for said, told in json.loads(made):
            script = (
                "return Object.fromEntries(Object.entries(IDEAS).map(([name, idea]) => [name, idea(arguments[0])]))"
            )
            shown = page.browser.execute_script(script, said)
            assert {name: pytest.approx(times, rel=1e-9) for name, times in told.items()} == shown
        before = page.browser.find_element("css selector", "#bars .with output").text
        slider = page.browser.find_element("css selector", "input[name=link_gbit_per_s]")
        slider.send_keys(Keys.ARROW_RIGHT * 20)
        assert page.browser.find_element("css selector", "#bars .with output").text != before


SECTIONS = """
return Object.fromEntries([...document.querySelectorAll('#bars section')].map(section => [section.dataset.idea, {
    grey: section.classList.contains('extrapolated'),
    outside: section.querySelector('.outside').hidden ? '' : section.querySelector('.outside').textContent,
    dots: [...section.querySelectorAll('.track i')].filter(dot => !dot.hidden).map(dot => dot.className),
    told: section.querySelector('.run').textContent,
}]))
"""


def test_recorded_runs_are_dots_and_the_rest_is_extrapolated(site: Path) -> None:
    from selenium.webdriver.support.ui import Select

    with visiting(f"file://{site}/tricks.html") as page:
        first = page.browser.execute_script(SECTIONS)
        assert not first["ProgressiveServe"]["grey"] and not first["Sarathi-Serve"]["grey"]
        assert all("extrapolated: " in shown["outside"] for shown in first.values() if shown["grey"])
        bars = page.browser.execute_script("return [...document.querySelectorAll('.bar')].map(bar => bar.innerText)")
        assert len(bars) == 11 and all(re.fullmatch(r".{10,}: [0-9.]+ m?s", bar) for bar in bars)
        for idea in first:
            page.browser.find_element("css selector", f"section[data-idea='{idea}'] button").click()
            shown = page.browser.execute_script(SECTIONS)[idea]
            assert not shown["grey"] and not shown["outside"] and set(shown["dots"]) == {"here"}, idea
            assert shown["told"].startswith("Recorded here: ")
        typed = page.browser.find_element("css selector", "input[data-of=prompt_tokens]")
        typed.clear()
        typed.send_keys("77")
        moved = page.browser.execute_script(SECTIONS)["Sarathi-Serve"]
        assert typed.get_property("value") == "77" and moved["outside"].endswith("the record: prompt")
        assert moved["grey"] and "here" not in moved["dots"]
        assert moved["told"].startswith("Recorded with other settings: ")
        card = Select(page.browser.find_element("css selector", "select[data-kind=card]"))
        assert card.first_selected_option.text == "own numbers"
        card.select_by_visible_text("nvidia-h200")
        assert (
            float(page.browser.find_element("css selector", "input[data-of=tflop_per_s]").get_property("value")) > 400
        )
        page.check_widths("site-tricks-recorded")
        assert page.errors() == []
