"""The site in a headless browser, as wide as a desk and a telephone: nothing fails, filters and policies work."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from browsers import Page, visiting
from started import PYTHON, ROOT
from waiting import until

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


NATIVE = """
import json, sys
import numpy as np
from firsttoken.sarathi.capacity import STRICT
from firsttoken.simulation.hardware import Hardware
from firsttoken.sarathi.policy import Policy
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig
profile, rows = load_profile("quick"), {}
bench = Bench(profile.section("capacity", CapacityConfig), profile.section("hardware", Hardware))
for name in sys.argv[1:]:
    served, _ = bench.run(Policy.named(name), bench.objective(STRICT), profile.seed, 2.0)
    firsts, gaps = [one.ttft_s for one in served], np.concatenate([np.diff(one.times_s) for one in served])
    seconds = max(one.times_s[-1] for one in served) - min(one.arrival_s for one in served)
    tokens = sum(one.sampling.max_tokens for one in served)
    times = [np.median(firsts), np.percentile(firsts, 99), 1e3 * np.percentile(gaps, 99), 1e3 * gaps.max()]
    rows[name] = [*map(float, times), tokens / seconds]
print(json.dumps(rows))
"""
SIBLINGS = ("prefill_first", "iteration_level", "sarathi 512")
RUNS = "Your scheduler runs ..."
POLICY = """from firsttoken.engine.schedulers.sarathi import Sarathi


class Mine(Sarathi):
    def budget(self, decodes):
        {}
        return max(len(decodes) + 1, self.config.token_budget // 3)
"""


def run(page: Page, policy: str) -> str:
    """What the page says once the policy has run."""
    write(page, policy)
    page.click("run")
    until(page.browser.find_element("id", "run").is_enabled, "the policy has run")
    return page.text("said")


def write(page: Page, policy: str) -> None:
    page.browser.execute_script("document.getElementById('policy').value = arguments[0]", policy)


def row(page: Page, policy: str) -> list[float]:
    """The numbers beside ``policy``, as they were before they were rounded."""
    cells = page.browser.find_elements("css selector", f"tr[data-policy='{policy}'] td + td")
    return [float(cell.get_attribute("data-value")) for cell in cells if cell.text]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Its address on a static server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def scheduler(site: Path) -> Path:
    if not (site / "scheduler.html").exists():
        pytest.skip("the site has no such page: run firsttoken fetch pyodide")
    return site


@pytest.fixture(scope="module")
def writer(scheduler: Path) -> Iterator[Page]:
    with served(scheduler) as address, visiting(f"{address}/scheduler.html") as page:
        yield page


def test_a_policy_of_the_readers_runs_as_the_library_runs_it(scheduler: Path, tmp_path: Path) -> None:
    """On a page that was opened from a folder; the other tests have theirs from a server."""
    mine = tmp_path / "mine.py"
    mine.write_text(POLICY.format("pass"), encoding="utf-8")
    command = [PYTHON, "-c", NATIVE, str(mine), *SIBLINGS]
    told = json.loads(subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout)
    with visiting(f"file://{scheduler}/scheduler.html") as page:
        assert run(page, page.browser.find_element("id", "policy").get_attribute("value")) == "Done."
        before = row(page, "mine.py")
        assert run(page, POLICY.format("pass")) == "Done." and before != row(page, "mine.py")
        shown = {name: row(page, name) for name in SIBLINGS} | {str(mine): row(page, "mine.py")}
        assert {name: pytest.approx(times, rel=1e-9) for name, times in told.items()} == shown
        page.check_widths("site-scheduler-run")
        assert page.errors() == []


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (POLICY.replace("(Sarathi)", "(Sarathi"), r"mine.py, line 4: SyntaxError: .*; mend the policy"),
        (POLICY.format("raise ValueError(len(decodes))"), r"mine.py, line 6: ValueError: 0; mend the policy"),
        ("import numpy\n" + POLICY, r"mine.py, line 1: ModuleNotFoundError: No module named 'numpy'; mend the policy"),
        ("x = 1", r"mine.py: defines no scheduler; .*"),
        (POLICY.format("return 10**6"), r"mine.py: a step of \d+ tokens with a budget of 512; .*"),
    ],
)
def test_what_a_policy_does_wrong_is_one_line(writer: Page, policy: str, says: str) -> None:
    said = run(writer, policy)
    assert re.fullmatch(says, said), said
    assert row(writer, "mine.py") == [] and writer.errors() == []


def test_a_policy_that_never_ends_is_stopped(writer: Page) -> None:
    """The page answers meanwhile, and a run after it, in another worker, gives the same."""
    assert run(writer, POLICY.format("pass")) == "Done."
    before = row(writer, "mine.py")
    write(writer, POLICY.format("while True: pass"))
    writer.click("run")
    until(lambda: writer.text("said") == RUNS, "it has begun")
    time.sleep(2)
    assert writer.text("said") == RUNS and not writer.browser.find_element("id", "run").is_enabled()
    writer.click("stop")
    assert writer.text("said") == "Stopped."
    writer.click("run")
    writer.click("stop")  # while Python starts
    assert writer.text("said") == "Stopped."
    assert run(writer, POLICY.format("pass")) == "Done." and row(writer, "mine.py") == before
    assert writer.errors() == []
