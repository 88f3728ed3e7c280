"""The kernels' library: built once, whole or not at all, and done without where it cannot be built."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from waiting import until

from firsttoken.engine.kv import KVShape
from firsttoken.study import paths
from firsttoken.study.errors import ProfileError
from firsttoken.study.system import compiled
from firsttoken.study.system.compiled import say_once, shared_library
from firsttoken_cpu import native_attend
from firsttoken_cpu.cpu_accelerator import CPUAccelerator
from firsttoken_cpu.native import exports
from firsttoken_cpu.native.exports import FUNCTIONS, STORAGE, WIDTHS, Exports, WeightMemory
from firsttoken_cpu.native.library import NAMES, Kernels, kernels
from firsttoken_cpu.native_attend import TiledAttend, supports
from firsttoken_extras.bitplanes.native_words import merger

CPU = torch.device("cpu")
SYMBOLS = [f"{name}_{dtype}" for name in FUNCTIONS for dtype in STORAGE]
CXX = shutil.which("c++")
needs_compiler = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library is kept: not the folder that other tests load it from."""
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    for name in ("CXX", compiled.ACCELERATOR):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "native"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """CXX is a shell script from now on; ``$result`` is the file it is to write, which a question for macros lacks."""

    def make(body: str) -> Path:
        script = tmp_path / "compiler"
        script.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) for result; do :; done;; esac\n{body}\n')
        script.chmod(0o755)
        monkeypatch.setenv("CXX", str(script))
        return script

    return make


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with the same functions that do nothing: it compiles in no time."""
    path = tmp_path / "kernels.cpp"
    counts = "".join(
        f'extern "C" long {name}() {{ return 32; }}\n' for name in ("panel_outputs", "multiplies_bfloat16")
    )
    path.write_text(counts + "".join(f'extern "C" void {name}() {{}}\n' for name in SYMBOLS))
    monkeypatch.setattr(exports, "SOURCE", path)
    monkeypatch.setattr(Exports, "multiplies", lambda *_: True)  # what does nothing multiplies nothing
    return path


def build() -> Kernels | None:
    """As the first call in a process."""
    return kernels.__wrapped__()


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture) -> Callable[[], str]:
    """What says that there are no kernels: one line on the terminal, however many ask for them."""

    def said() -> str:
        say_once.cache_clear()
        assert build() is None
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("firsttoken: the engine runs without its own CPU kernels, slower: ")
        return line

    return said


def left(folder: Path) -> list[str]:
    """What lies in the folder, and below it."""
    return sorted(path.name for path in folder.rglob("*"))


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, refusal) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "there is no C++ compiler" in refusal()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no C++ compiler" in refusal()
    assert left(folder) == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            'echo "In file included from nowhere:" >&2; echo "fatal: out of ideas" >&2; exit 1',
            "slower: fatal: out of ideas",
        ),
        ("exit 3", "exit status 3"),
        ("echo >&2; echo >&2; exit 3", "exit status 3"),
        (r"printf 'd\351sol\351' >&2; exit 1", "sol\ufffd"),
        (
            'case "$*" in *-fopenmp*) echo "unsupported option -fopenmp" >&2; exit 1;; esac',
            "slower: unsupported option -fopenmp",
        ),
    ],
    ids=["its last line", "no word", "no line", "no text", "no OpenMP of any kind"],
)
def test_a_compiler_that_always_fails(compiler, refusal, folder: Path, body: str, told: str) -> None:
    compiler(body)
    assert told in refusal()
    assert left(folder) == []


@needs_compiler
def test_a_compiler_with_arguments(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    monkeypatch.setenv("CXX", f"{CXX} -DMORE=1")
    assert isinstance(build(), Kernels)


@needs_compiler
@pytest.mark.parametrize(
    ("end", "told"), [("echo 'kernels.cpp:1: error: no' >&2; exit 1", "error: no"), ("kill -KILL $$", "SIGKILL")]
)
def test_nothing_is_left_of_a_failed_build(compiler, refusal, folder: Path, source: Path, end: str, told: str) -> None:
    """Whether the compiler gives up or is killed, in the middle of what it writes; the next one starts afresh."""
    compiler(f'if [ -n "$result" ]; then echo half > "$result"; {end}; fi; exec {CXX} "$@"')
    assert told in refusal()
    assert left(folder) == []
    compiler(f'exec {CXX} "$@"')
    assert isinstance(build(), Kernels)


@needs_compiler
@pytest.mark.parametrize(
    ("unknown", "taken"),
    [
        ([], ["-march=native", "-fopenmp"]),
        (["-march=native"], ["-mcpu=native", "-fopenmp"]),  # Clang on arm64, for long
        (["-march=native", "-mcpu=native"], ["-fopenmp"]),
        (["-fopenmp"], ["-march=native", "-Xpreprocessor -fopenmp -undefined dynamic_lookup"]),  # Apple's
        (["-march=native", "-fopenmp"], ["-mcpu=native", "-Xpreprocessor -fopenmp -undefined dynamic_lookup"]),
    ],
    ids=["all", "no march", "no processor", "no OpenMP", "neither"],
)
def test_a_compiler_that_lacks_a_flag_gets_another(compiler, tmp_path, source, unknown, taken) -> None:
    refuse = "".join(f"*' {flag} '*) echo 'unsupported option {flag}' >&2; exit 1;; " for flag in unknown)
    asked = "$(echo \" $* \" | sed 's/-Xpreprocessor -fopenmp/-Xpreprocessor-fopenmp/')"  # that one is not the driver's
    log = tmp_path / "log"
    compiler(
        f'case "{asked}" in {refuse} esac; echo "$*" >> {log}\n'
        f'args=$(echo "$*" | sed "s/-Xpreprocessor -fopenmp -undefined dynamic_lookup//; s/-mcpu=native//")\n'
        f"exec {CXX} $args"
    )
    assert isinstance(build(), Kernels)
    for line in log.read_text().splitlines():
        between = line[line.index("-fassociative-math") :]
        assert between.startswith(" ".join(["-fassociative-math", *taken]) + " -")


@needs_compiler
def test_a_library_without_the_functions(refusal, source: Path) -> None:
    source.write_text('extern "C" void attend_float32() {}\n')
    assert "attend_bfloat16" in refusal()


@needs_compiler
def test_a_cache_that_cannot_be_written(refusal, tmp_path: Path, source: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert "cache" in refusal()


@needs_compiler
def test_one_library_for_each_source_and_compiler(compiler, tmp_path: Path, folder: Path, source: Path) -> None:
    log = tmp_path / "log"
    counting = f'if [ -n "$result" ]; then echo built >> {log}; fi; exec {CXX} "$@"'
    compiler(counting)

    def builds() -> int:
        assert isinstance(build(), Kernels)
        assert all(name.startswith("kernels-") and name.endswith(".so") for name in left(folder))
        assert len(left(folder)) == len(log.read_text().split())
        return len(left(folder))

    assert [builds(), builds()] == [1, 1]
    source.write_text(source.read_text() + "// changed\n")
    assert [builds(), builds()] == [2, 2]
    (source.parent / "more.h").write_text("// what it may include\n")
    assert [builds(), builds()] == [3, 3]
    compiler(counting.replace('"$@"', '-DNEWER=1 "$@"'))  # as another version, or another processor, would answer
    assert [builds(), builds()] == [4, 4]
    compiler(counting)
    assert builds() == 4


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "zeroed", "empty", "foreign", "one bit"])
def test_a_library_that_is_not_what_was_built_is_built_again(damage, compiler, tmp_path, folder, source, capfd) -> None:
    """Before anybody loads it: what half a file maps ended the process. One line says so, and the next start none."""
    log = tmp_path / "log"
    compiler(f'if [ -n "$result" ]; then echo built >> {log}; fi; exec {CXX} "$@"')
    assert isinstance(build(), Kernels)
    (file,) = folder.iterdir()
    right = file.read_bytes()
    middle = len(right) // 2
    others = {
        "cut": right[:middle],
        "zeroed": right[:middle] + bytes(len(right) - middle),
        "empty": b"",
        "foreign": right[:18] + b"\xb7" + right[19:],  # an ELF file for arm64
        "one bit": right[:middle] + bytes([right[middle] ^ 1]) + right[middle + 1 :],
    }
    file.unlink()  # this process has mapped the right one
    file.write_bytes(others[damage])
    say_once.cache_clear()
    assert isinstance(build(), Kernels) and isinstance(build(), Kernels)
    assert capfd.readouterr().err == f"firsttoken: {file} is cut or altered; it is compiled again\n"
    assert [one.read_bytes() for one in folder.iterdir()] == [right]
    assert log.read_text().split() == ["built"] * 2


@needs_compiler
def test_of_several_that_want_it_one_builds_it(compiler, tmp_path: Path, folder: Path, source: Path) -> None:
    """Threads here, and processes that begin at once."""
    log = tmp_path / "log"
    compiler(f'if [ -n "$result" ]; then echo built >> {log}; sleep 0.5; fi; exec {CXX} "$@"')
    code = "from pathlib import Path; from firsttoken.study.system.compiled import shared_library as library\n"
    code += f"print(library(Path({str(source)!r})))"
    environment = os.environ | {"FIRSTTOKEN_CACHE": str(folder.parent)}
    others = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    with ThreadPoolExecutor(3) as threads:
        found = {str(file) for file in threads.map(lambda _: shared_library(source), range(3))}
    assert {one.communicate(timeout=60)[0].strip() for one in others} == found
    assert log.read_text().split() == ["built"] and left(folder) == [Path(*found).name]


@pytest.fixture
def beside() -> Iterator[None]:
    with compiled.build_beside():
        yield


@needs_compiler
def test_a_service_does_not_wait_for_the_compiler(compiler, beside, tmp_path, folder, source, refusal) -> None:
    """It goes on without the kernels, which one process beside it builds; the next start has them."""
    log, go = tmp_path / "log", tmp_path / "go"
    waiting = f"echo built >> {log}; while [ ! -e {go} ]; do sleep 0.05; done"
    compiler(f'if [ -n "$result" ]; then {waiting}; fi; exec {CXX} "$@"')
    assert refusal().endswith("slower: kernels.cpp is being compiled; the next start has it") and build() is None
    go.touch()
    until(lambda: any(name.endswith(".so") and name.startswith("kernels-") for name in left(folder)), "it is built")
    assert isinstance(build(), Kernels) and log.read_text().split() == ["built"]
    until(lambda: len(list(folder.iterdir())) == 1, "the lock of the build is gone")
    (library,) = folder.iterdir()
    library.unlink()  # this process has mapped it
    library.write_bytes(b"half")
    compiled._begin_beside.cache_clear()  # as another process
    assert "is being compiled again, as its library was cut or altered; the next start has it" in refusal()
    until(lambda: library.stat().st_size > 4, "it is built again")


@needs_compiler
def test_what_fails_beside_a_service_is_a_line(compiler, beside, folder, source, refusal, capfd) -> None:
    compiler(f'if [ -n "$result" ]; then echo "error: no room" >&2; exit 1; fi; exec {CXX} "$@"')
    assert "is being compiled" in refusal()
    said = []
    until(lambda: said.append(capfd.readouterr().err) or "".join(said).count("\n"), "it says why")
    assert "".join(said) == "firsttoken: kernels.cpp cannot be compiled: error: no room\n"


def test_torch_alone_is_asked_for_without_a_word(monkeypatch: pytest.MonkeyPatch, folder: Path, capfd) -> None:
    monkeypatch.setenv(compiled.ACCELERATOR, "none")
    assert build() is None and merger.__wrapped__() is None
    assert capfd.readouterr().err == "" and not folder.exists()
    monkeypatch.setenv(compiled.ACCELERATOR, "cuda")
    with pytest.raises(ProfileError, match="FIRSTTOKEN_ACCELERATOR is 'cuda'; give it one of: kernels"):
        build()


@needs_compiler
def test_what_multiplies_is_what_the_environment_says(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As on a processor with AMX, whatever this one has: bfloat16 is oneDNN's, and all else the kernels'."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    own = build().multiplied
    assert torch.float32 in own
    monkeypatch.setenv(compiled.ACCELERATOR, "onednn")
    assert build().multiplied == own - {torch.bfloat16}
    pool = SimpleNamespace(shape=shape(dtype=torch.bfloat16), device=CPU)
    monkeypatch.setattr(native_attend, "kernels", object)
    assert CPUAccelerator().attention(pool) is TiledAttend


@needs_compiler
def test_the_real_source_builds_without_a_warning(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        built = build()
    assert isinstance(built, Kernels) and len(left(folder)) == 1
    states = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(built.rms_norm(states, torch.ones(2), 0.0), states / 12.5**0.5)


def shape(**changed) -> KVShape:
    return KVShape(**({"layers": 1, "kv_heads": 1, "head_dim": 16, "dtype": torch.float32} | changed))


def test_supports_what_the_kernels_are_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_attend, "kernels", object)  # some, built or not
    assert all(supports(shape(head_dim=width, dtype=dtype), CPU) for width in WIDTHS for dtype in NAMES)
    assert not any(supports(shape(dtype=dtype), CPU) for dtype in (torch.float16, torch.float64))
    assert not any(supports(shape(head_dim=width), CPU) for width in (1, 8, 17, 48, 96, 256))
    assert not supports(shape(), torch.device("cuda"))
    monkeypatch.setattr(native_attend, "kernels", lambda: None)
    assert not supports(shape(), CPU)


def test_nothing_is_built_for_what_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_attend, "kernels", lambda: pytest.fail("seconds of compiling for nothing"))
    assert not supports(shape(head_dim=8), CPU)


def test_weights_stay_what_they_are_on_huge_pages() -> None:
    memory = WeightMemory(huge=False)
    some = [memory.allocate(size) for size in (5 << 20, 3, 40 << 20)]
    for number, one in enumerate(some, 1):
        one[:] = number
    memory.collapse()  # where the system can, and else it does nothing
    assert all((one == number).all() for number, one in enumerate(some, 1))
    assert not memory.allocate(1 << 20).any()


def test_memory_goes_with_the_last_weight_in_it() -> None:
    memory = WeightMemory(huge=True)
    one = memory.allocate(40 << 20)
    lowest = one
    while isinstance(lowest, np.ndarray):
        lowest = lowest.base
    there = weakref.ref(lowest.obj)  # what is mapped, of which this is a view
    del lowest
    memory.allocate(40 << 20)  # of which the memory keeps the rest
    assert there() is not None
    del one
    assert there() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not copied here")
def test_what_a_copy_of_the_process_packs_is_its_own() -> None:
    """A fork server's copies take from the rest of the same chunk: none may write into another's weights."""
    memory = WeightMemory(huge=False)
    first = memory.allocate(64)
    if not (copy := os.fork()):
        memory.allocate(64)[:] = 1
        first[:] = 1
        os._exit(0)
    assert os.waitpid(copy, 0)[1] == 0
    assert not first.any() and not memory.allocate(64).any()
