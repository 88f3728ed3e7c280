"""The page in a headless browser: over a model that is here, and over a swarm, one of whose servers is killed."""

from __future__ import annotations

import math
import os
import shutil
import signal
from pathlib import Path

import pytest
from browsers import Page, visiting
from started import KEY, asked, served, swarm_of, written
from waiting import until

pytestmark = pytest.mark.skipif(
    not shutil.which("chromedriver"), reason="no browser here: apt install chromium chromium-driver"
)
pytest.importorskip("selenium", reason="not in .venv-clients: run tests/run.sh --clients")
PROMPT = "the inn in the north"
STRANGER = "<img/src=x/onerror=alert(1)>:80"  # who says so is where nobody can be asked


def ask(page: Page, tokens: int, chat: bool = False) -> None:
    if page.browser.find_element("id", "chat").is_selected() is not chat:
        page.click("chat")
    page.put("prompt", PROMPT)
    page.put("tokens", str(tokens))
    page.click("go")


def free(page: Page) -> bool:
    """Nothing runs, and nothing is kept."""
    return page.text("running") == "0" and page.text("blocks").startswith("0 of ")


def said(page: Page) -> str:
    return page.whole_text("answer").removeprefix(PROMPT)


def ended(page: Page) -> bool:
    return page.text("go") == "Answer"


def test_it_shows_the_engine_while_it_streams(tmp_path: Path) -> None:
    folder = written("write_tiny", tmp_path / "tiny")
    with served(folder, FIRSTTOKEN_API_KEY=KEY) as url, visiting(url) as page:
        until(lambda: "stage 3: serving" in page.text("stages"), "the stages are shown")
        until(lambda: free(page), "nothing runs")
        first, *others = page.browser.execute_script("return [...at('stages').children].map(box => box.offsetWidth)")
        assert [round(first / other, 1) for other in others] == [1.4, 1.4], "as wide as its bytes"
        ask(page, 500)
        until(lambda: "API key is missing" in said(page), "it says what it lacks")
        page.put("key", KEY)
        page.click("go")
        seen = set()

        def whole() -> bool:
            seen.add((page.text("running"), page.text("blocks").startswith("0 of ")))
            return len(said(page)) > 100 and ended(page)

        until(whole, "the answer is there")
        assert ("1", False) in seen, "a request ran and had blocks while the page looked"
        until(lambda: free(page), "all is given back")
        figures = page.text("figures")
        assert figures.startswith("first token after ") and " tokens/s, 500 tokens, it ends at the limit" in figures
        page.check_widths("page")
        for turn in (1, 2):
            ask(page, 20, chat=True)
            until(lambda: ended(page) and page.text("figures").endswith(("(length)", "(stop)")), "a turn is answered")
            assert page.whole_text("answer").count(PROMPT) == turn
        page.check_widths("chat")
        page.click("anew")
        assert page.whole_text("answer") == page.text("figures") == ""
        assert not [error for error in page.errors() if "401" not in error]


def test_a_server_of_a_swarm_is_killed_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """The answer ends as without it, and the page names who answers."""
    folder = written("write_endless", tmp_path / "plain")
    with (
        swarm_of(folder, "0:3", "3:6~", "3:6~", f"0:3@{STRANGER}") as lent,
        # who is silent is replaced late, so that a link that is held holds the answer until its server is killed
        served(folder, "--swarm", next(iter(lent.servers)), "--swarm-step-s", "120") as url,
        visiting(url) as page,
    ):
        servers = lent.servers
        first, *seconds, stranger = servers
        ask(page, 300)
        until(lambda: ended(page) and len(said(page)) > 100, "an answer without a fault")
        undisturbed = said(page)
        lent.let(0)
        ask(page, 300)

        def some() -> bool:
            """The answer goes on while the test looks, a few pieces at a time, so that no machine is too fast."""
            if len(said(page)) > 20:
                return True
            lent.let(4)
            return False

        until(some, "some of the next is there")
        lent.let(0)
        lost = asked(f"{url}/stage")["servers"][1]["address"]
        (heir,) = set(seconds) - {lost}
        assert stranger not in page.browser.page_source and first in page.text("servers")
        assert lost in page.text("servers") and heir not in page.text("servers")
        assert page.text("running") == "1" and not ended(page), "it is in the middle of an answer"
        page.check_widths("swarm")
        os.kill(servers[lost][1], signal.SIGKILL)
        lent.let(math.inf)
        until(lambda: ended(page), "the answer ends")
        assert said(page) == undisturbed
        until(lambda: heir in page.text("servers") and lost not in page.text("servers"), "and who answers")
        page.check_widths("swarm-after")
        assert page.errors() == []
