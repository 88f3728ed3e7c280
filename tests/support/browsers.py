"""A headless browser before a page of the service."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

QUIET = (  # it asks for nothing but the page
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
WIDTHS = (1280, 400)  # pixels: a desk, a phone


class Page:
    """What a person sees of ``browser``."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def text(self, name: str) -> str:
        """Of the element of this id."""
        return self.browser.find_element("id", name).text

    def whole_text(self, name: str) -> str:
        """The same as it was written: a browser shows some of it as other blanks."""
        return self.browser.find_element("id", name).get_attribute("textContent")

    def put(self, name: str, value: str) -> None:
        """Write ``value`` into a field."""
        field = self.browser.find_element("id", name)
        field.clear()
        field.send_keys(value)

    def click(self, name: str) -> None:
        self.browser.find_element("id", name).click()

    def errors(self) -> list[str]:
        """What the console holds since it was asked last."""
        return [entry["message"] for entry in self.browser.get_log("browser")]

    def check_widths(self, name: str) -> None:
        """At each width nothing lies beside the page; with FIRSTTOKEN_SHOTS, pictures ``name`` are left there."""
        for width in WIDTHS:
            size = {"width": width, "height": 1600, "deviceScaleFactor": 1, "mobile": False}
            self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            beside = self.browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
            assert beside <= 0, f"{name}: {beside} pixels lie beside a page of {width}"
            if shots := os.environ.get("FIRSTTOKEN_SHOTS"):
                self.browser.save_screenshot(str(Path(shots) / f"{name}-{width}.png"))


@contextmanager
def visiting(url: str) -> Iterator[Page]:
    """The page at ``url`` in a browser that has never been anywhere."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for argument in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        browser = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            browser.get(url)
            yield Page(browser)
        finally:
            browser.quit()
