"""The site in a headless browser, at the width of a desk and of a telephone: nothing fails, and the filters work."""

from __future__ import annotations

import json
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
    told.append([said, {name: list(idea(tricks.Situation(**said))) for name, (idea, _) in tricks.IDEAS.items()}])
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
        before = page.browser.find_element("css selector", "#bars .with span").text
        slider = page.browser.find_element("css selector", "input[name=link_gbit_per_s]")
        slider.send_keys(Keys.ARROW_RIGHT * 20)
        assert page.browser.find_element("css selector", "#bars .with span").text != before


SECTIONS = """
return Object.fromEntries([...document.querySelectorAll('#bars section')].map(section => [section.dataset.idea, {
    grey: section.classList.contains('extrapolated'),
    outside: section.querySelector('.outside').hidden ? '' : section.querySelector('.outside').textContent,
    dots: [...section.querySelectorAll('.track i')].filter(dot => !dot.hidden).map(dot => dot.className),
    told: section.querySelector('.run').textContent,
}]))
"""


def test_recorded_runs_are_dots_and_the_rest_is_extrapolated(site: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    with visiting(f"file://{site}/tricks.html") as page:
        first = page.browser.execute_script(SECTIONS)
        assert all(shown["grey"] and "extrapolated: " in shown["outside"] for shown in first.values())
        assert not any("here" in shown["dots"] for shown in first.values())
        for idea in first:
            page.browser.find_element("css selector", f"section[data-idea='{idea}'] button").click()
            shown = page.browser.execute_script(SECTIONS)[idea]
            assert not shown["grey"] and not shown["outside"] and shown["dots"] == ["here", "here"], idea
            assert shown["told"].startswith("Recorded here: ")
        slider = page.browser.find_element("css selector", "input[name=tflop_per_s]")
        slider.send_keys(Keys.ARROW_RIGHT * 10)  # Sarathi-Serve's is the last that was set
        moved = page.browser.execute_script(SECTIONS)["Sarathi-Serve"]
        assert moved["grey"] and moved["outside"].endswith("measured: compute") and "here" not in moved["dots"]
        assert moved["told"].startswith("Recorded with other settings: ")
        page.check_widths("site-tricks-recorded")
        assert page.errors() == []
