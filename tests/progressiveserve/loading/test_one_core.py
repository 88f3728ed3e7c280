"""Threads whose parallel loops run on one core."""

from __future__ import annotations

import threading

import torch

from firsttoken.progressiveserve.loading.weight_builder import on_pinned_core


def test_its_loops_are_its_own_and_nobody_elses():
    torch.set_num_threads(2)
    found = {}
    on_pinned_core("alone", lambda: found.update(alone=torch.get_num_threads())).join()
    later = threading.Thread(target=lambda: found.update(later=torch.get_num_threads()))
    later.start()
    later.join()
    assert found == {"alone": 1, "later": 2} and torch.get_num_threads() == 2
