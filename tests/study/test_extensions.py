"""What other packages add is found by name, imported when it is asked for, and missed in one line."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from firsttoken.progressiveserve.checkpoint.part_formats import KIND, format_of
from firsttoken.study import extensions
from firsttoken.study.errors import ModelError
from firsttoken_extras import registered

KINDS = [name for name in vars(registered) if name.isupper()]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in getattr(registered, kind)])
def test_what_is_registered_is_there(kind: str, name: str) -> None:
    module, _, _ = getattr(registered, kind)[name].partition(":")
    assert importlib.util.find_spec(module)
    try:
        assert callable(extensions.extension(kind, name))
    except ImportError as error:
        pytest.skip(f"{error}, which is optional")


def test_who_asks_for_none_imports_none() -> None:
    code = (
        "import sys, firsttoken.progressiveserve.checkpoint.manifest, firsttoken.progressiveserve.loading.read_plan\n"
        "assert not [name for name in sys.modules if name.startswith(('firsttoken_', 'torch', 'numpy'))]\n"
        "from firsttoken.progressiveserve.checkpoint.part_formats import format_of\n"
        "format_of('planes').read({'split': 'bits', 'plane': 0, 'cut': {}})\n"
        "assert not {'torch', 'numpy', 'zstandard'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("there", [True, False])
def test_without_the_server_nothing_serves(there: bool) -> None:
    """None in sys.modules is how Python finds a package that is not on its path."""
    gone = "" if there else "sys.modules['firsttoken_serve'] = None; "
    code = f"import sys; {gone}from firsttoken.__main__ import main; main(['--help'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    listed = set(re.findall(r"^    (\w+) ", ran.stdout, re.M))
    assert ran.returncode == 0 and {"run", "fetch", "stage"} <= listed, ran.stderr
    assert {"serve", "prefix", "swarm"} & listed == ({"serve", "prefix", "swarm"} if there else set())


def test_a_format_that_nobody_reads_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"in the format 'bites', which nothing here reads \(known: planes\); install"):
        format_of("bites")
    monkeypatch.setattr(extensions, "REGISTERED", ("firsttoken_of_nobody",))
    extensions.registered.cache_clear()
    try:
        with pytest.raises(ModelError, match=r"'planes', which nothing here reads \(known: none\); install firsttoken"):
            format_of("planes")
    finally:
        extensions.registered.cache_clear()


def test_a_format_that_lacks_a_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extensions.registered(KIND), "planes", "firsttoken_extras.bitplanes.nothing:Nothing")
    with pytest.raises(ModelError, match=r"'planes' cannot be read \(No module named .*nothing'\); install what is"):
        format_of("planes")
