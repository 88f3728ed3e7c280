"""The kernels as they are built here, and the number of their threads."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

from firsttoken_cpu.native.library import Kernels, kernels

COMPILERS = [name for name in ("c++", "clang++") if shutil.which(name)]
"""The machine's own compiler and, where that is another one, clang."""


@pytest.fixture(scope="module", params=COMPILERS or [None])
def native(request: pytest.FixtureRequest) -> Kernels:
    if request.param is None:
        pytest.skip("there is no C++ compiler")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("CXX", request.param)
        built = kernels.__wrapped__()
    if built is None:
        pytest.skip(f"{request.param} does not build the kernels here")
    return built


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
