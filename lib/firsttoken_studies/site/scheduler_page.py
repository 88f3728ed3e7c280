"""The page on which a reader writes a scheduler: Python for the browser, the library's modules, and the draws, as one
script, which a page may load from a folder, too."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile
from base64 import b64encode
from dataclasses import asdict
from pathlib import Path

import firsttoken
from firsttoken.assets.lock import Asset, load_lock
from firsttoken.sarathi.capacity import STRICT
from firsttoken.simulation.hardware import PUBLISHED, Hardware
from firsttoken.study.errors import AssetError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb41_serving_capacity.bench import Bench, CapacityConfig
from firsttoken_studies.site.scheduler_scene import SchedulerScene
from firsttoken_studies.trying.scheduler import RATE

SIBLINGS = {
    "prefill_first": "prefill-first",
    "iteration_level": "iteration-level",
    "sarathi 512": "Sarathi, 512 tokens",
}
LIB = Path(firsttoken.__file__).parents[1]
SCENE = "firsttoken_studies.site.scheduler_scene"
POLICY = '''from firsttoken.engine.schedulers.sarathi import Sarathi


class Quarter(Sarathi):
    name = "quarter"

    def budget(self, decodes):
        """Tokens that the next step may hold; one for each of its decodes is among them."""
        return max(len(decodes) + 1, self.config.token_budget // 4)
'''

_IMPORTED = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "firsttoken", "firsttoken_studies"}:
            raise ModuleNotFoundError(f"{name} is not in the browser")

before = set(sys.modules)
sys.meta_path.insert(0, Refusing())
__import__(sys.argv[1])
print(*(sys.modules[name].__file__ for name in set(sys.modules) - before if name.startswith("firsttoken")), sep="\\n")
"""


def modules(entry: str = SCENE) -> list[Path]:
    """The files below ``LIB`` that importing the module ``entry`` runs; the standard library is all that they need.

    Raises CalledProcessError where one of them imports what a browser lacks.
    """
    run = subprocess.run([sys.executable, "-c", _IMPORTED, entry], cwd=LIB, check=True, capture_output=True, text=True)
    return sorted(Path(line).relative_to(LIB) for line in run.stdout.splitlines())


def library() -> bytes:
    """A zip of the modules, which Python imports from; the same bytes for the same files."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in modules():
            archive.writestr(zipfile.ZipInfo(str(path)), (LIB / path).read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def scene() -> tuple[SchedulerScene, str]:
    """The first draw of `firsttoken try scheduler` at the quick profile, and what it is in words.

    Raises AssetError and CorpusError where the lengths of its requests are not there.
    """
    profile = load_profile("quick", **{"hardware.costs": PUBLISHED})
    config, hardware = profile.section("capacity", CapacityConfig), profile.section("hardware", Hardware)
    bench = Bench(config, hardware)
    items = [
        (request.arrival_s, request.prompt_tokens, request.output_tokens)
        for request in bench.requests(profile.seed, RATE)
    ]
    setting = (
        f"{len(items)} requests with the lengths of ShareGPT's conversations come at {RATE:g} a second, at random "
        "moments that are the same for all schedulers. The GPU is simulated: a step takes what Sarathi-Serve's authors "
        "published for Yi-34B on two A100"
    )
    return SchedulerScene(tuple(items), hardware.blocks, config.batch, bench.objective(STRICT).tbt_s), setting


def pyodide() -> Asset:
    """Python for the browser. Raises AssetError where it is not in the cache."""
    (pyodide_asset,) = (asset for asset in load_lock(npm=True) if asset.name == "pyodide")
    if pyodide_asset.missing():
        raise AssetError(
            f"{pyodide_asset.pin} is not in the cache, and `firsttoken fetch {pyodide_asset.name}` brings it"
        )
    return pyodide_asset


def script(scene: SchedulerScene, python: Asset) -> str:
    """JavaScript with all that the page needs: files as base64 of gzip, and the scene."""
    files = {member.saved_as: member.target.read_bytes() for member in python.members} | {"library.zip": library()}
    lock = json.loads(files["pyodide-lock.json"]) | {"packages": {}}  # those of another place, which nobody asks here
    files["pyodide-lock.json"] = json.dumps(lock).encode()
    packed = {name: b64encode(gzip.compress(content, mtime=0)).decode() for name, content in files.items()}
    return f"const PACKED = {json.dumps(packed)};\nconst SCENE = {json.dumps(asdict(scene))};\n"
