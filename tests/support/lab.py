"""JupyterLab as a person has it: a notebook of this clone in a browser, whose cells are run, changed and turned."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from browsers import Page, visiting
from started import OURS, PYTHON, ROOT, asked
from waiting import until

SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},  # all cells are there, not only those in sight
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
ALONE = ("--LabApp.extension_manager=readonly", "--IdentityProvider.token=", "--ServerApp.allow_root=True")
STATUS = 'return document.querySelector(".jp-Notebook-ExecutionIndicator")?.dataset.status'
CELL = '//div[contains(@class, "jp-CodeCell")][.//div[contains(@class, "cm-content")][contains(., {})]]'


class Lab:
    """A notebook in JupyterLab before ``page``."""

    def __init__(self, page: Page, code_cells: int) -> None:
        self.page, self.code_cells, self.runs = page, code_cells, 0

    def run_all(self) -> None:
        """Choose Run All Cells in the menu, and wait until the kernel has run each cell once more."""
        self.runs += 1
        for kind, name in (("lm-MenuBar-itemLabel", "Run"), ("lm-Menu-itemLabel", "Run All Cells")):
            self._find(f'//div[contains(@class, "{kind}")][text()="{name}"]').click()
        last = f"[{self.runs * self.code_cells}]:"
        until(lambda: self.prompts()[-1] == last, "all cells have run")

    def outputs(self, code: str) -> Any:
        """The outputs of the cell that has ``code`` in it."""
        return self._cell(code).find_element("class name", "jp-Cell-outputWrapper")

    def picture(self, code: str) -> str:
        """The picture in the outputs of a cell, as a data URL."""
        script = 'return arguments[0].querySelector("img").src'  # in one go: a new picture is a new element
        return self.page.browser.execute_script(script, self.outputs(code))

    def turn(self, code: str, steps: int) -> str:
        """Move the slider of a cell by so many steps, each of which another picture follows; returns what it shows."""
        from selenium.webdriver.common.keys import Keys

        slider = self.outputs(code).find_element("css selector", ".widget-slider .noUi-handle")
        for _ in range(abs(steps)):
            before = self.picture(code)
            slider.send_keys(Keys.ARROW_RIGHT if steps > 0 else Keys.ARROW_LEFT)
            until(lambda before=before: self.picture(code) != before, "the picture follows the slider")
        return self.outputs(code).find_element("class name", "widget-readout").text

    def rewrite(self, line: str, better: str) -> None:
        """Put ``better`` in place of a line of a cell."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        place = self._find(f'//div[contains(@class, "cm-line")][contains(., {_quoted(line)})]')
        self.page.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
        keys = ActionChains(self.page.browser).click(place).send_keys(Keys.END).key_down(Keys.SHIFT)
        keys.send_keys(Keys.HOME).key_up(Keys.SHIFT).send_keys(better).perform()

    def prompts(self) -> list[str]:
        """What stands beside the code cells: "[5]:" of one that has run, "[*]:" while it waits, "[ ]:" before."""
        script = 'return [...document.querySelectorAll(".jp-CodeCell .jp-InputPrompt")].map(one => one.textContent)'
        return self.page.browser.execute_script(script)

    def _cell(self, code: str) -> Any:
        return self._find(CELL.format(_quoted(code)))

    def _find(self, path: str) -> Any:
        return self.page.browser.find_element("xpath", path)


def _quoted(text: str) -> str:
    """A string of XPath, which has no escapes."""
    assert '"' not in text or "'" not in text
    return f"'{text}'" if '"' in text else f'"{text}"'


@contextmanager
def opened(name: str, folder: Path) -> Iterator[Lab]:
    """A copy without outputs of the notebook whose name begins with ``name``; all that is written is in ``folder``."""
    (path,) = (ROOT / "notebooks").glob(f"{name}_*.ipynb")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell in code_cells:
        cell.update(outputs=[], execution_count=None)
    (folder / "notebooks").mkdir()
    (folder / "notebooks" / path.name).write_text(json.dumps(notebook), encoding="utf-8")
    for plugin, settings in SETTINGS.items():
        place = folder / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(settings), encoding="utf-8")
    with _server(folder) as url, visiting(f"{url}/lab/tree/{path.name}") as page:
        page.browser.set_window_size(1280, 1000)
        lab = Lab(page, len(code_cells))
        folded = [cell["metadata"].get("jupyter", {}).get("source_hidden", False) for cell in code_cells]
        fresh = ["" if hidden else "[ ]:" for hidden in folded]  # a cell whose source is folded shows no prompt
        until(lambda: lab.prompts() == fresh, "the notebook is open")
        until(lambda: page.browser.execute_script(STATUS) == "idle", "its kernel is ready")
        yield lab


@contextmanager
def _server(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    own = {name: str(folder / place) for name, place in {"JUPYTERLAB_SETTINGS_DIR": "settings", "HOME": "home"}.items()}
    own |= {f"JUPYTER_{kind}_DIR": str(folder / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    own |= {"JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "FIRSTTOKEN_OUT": str(folder)}
    own |= {"FIRSTTOKEN_CACHE": os.environ.get("FIRSTTOKEN_CACHE", str(ROOT / ".cache"))}
    command = [PYTHON, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", *ALONE]
    with (folder / "lab.log").open("wb") as log:
        command.append(f"--ServerApp.root_dir={folder / 'notebooks'}")
        server = subprocess.Popen(command, env=OURS | own, stdout=log, stderr=log)
        try:
            until(lambda: asked(f"http://127.0.0.1:{port}/api") is not None, "JupyterLab answers")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()
