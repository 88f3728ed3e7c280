"""A worker reads these modules before torch."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

from firsttoken.study import system


def test_the_standard_library_is_enough() -> None:
    modules = [f"firsttoken.study.system.{module.name}" for module in pkgutil.iter_modules(system.__path__)]
    code = f"import sys, {', '.join(modules)}; sys.exit(bool({{'torch', 'numpy', 'yaml'}} & set(sys.modules)))"
    assert modules and subprocess.run([sys.executable, "-c", code]).returncode == 0
