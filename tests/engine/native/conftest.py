"""The kernels as they are built here, and the number of their threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from firsttoken.engine.native.library import Kernels, kernels


@pytest.fixture(scope="module")
def native() -> Kernels:
    built = kernels()
    if built is None:
        pytest.skip("no C++ compiler builds the kernels here")
    return built


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
