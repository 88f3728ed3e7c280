"""Host memory of the vLLM connector: copies that bring back every bit, settings that cannot be. Needs no vLLM."""

from __future__ import annotations

import pytest
import torch

from firsttoken.engine.swap.host_pool import Span
from firsttoken.study.errors import ProfileError
from firsttoken_extras.vllm_cross_point.host import KVBlocksOnHost
from firsttoken_extras.vllm_cross_point.settings import CrossPointSettings


def test_blocks_come_back_as_they_went() -> None:
    caches = [torch.randn(9, 2, 4, 6) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    pool = KVBlocksOnHost(caches, blocks=5, pin_memory=False)
    pool.copy_out([7, 2, 4], Span(1, 3))
    for cache in caches:
        cache[[7, 2, 4]] = 0
    pool.copy_in(Span(2, 2), [8, 0])  # the last two, to other blocks
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[8, 0]], old[[2, 4]])
        assert torch.equal(cache[[1, 3, 5, 6]], old[[1, 3, 5, 6]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"threshold_tokens": 8, "host_byte": 1}, r"unknown key 'host_byte'.*did you mean 'host_bytes'"),
        ({"threshold_tokens": 8}, "missing key 'host_bytes'"),
        ({"threshold_tokens": -1, "host_bytes": 1}, "threshold_tokens must be 0 or more, not -1"),
        (
            {"threshold_tokens": 8, "host_bytes": 1, "victim": "longst"},
            r"no victim choice 'longst'; known: .*shortest.*did you mean 'longest'",
        ),
        (
            {"threshold_tokens": 8, "host_bytes": 1, "resume": "in_ordr"},
            r"'in_ordr' is not known; known: in_order, last_preempted_first \(did you mean 'in_order'",
        ),
        ({"threshold_tokens": 8.5, "host_bytes": 1}, "expected int, not 8.5"),
    ],
)
def test_settings_that_cannot_be_are_one_line(values: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=f"^kv_connector_extra_config.*{message}") as caught:
        CrossPointSettings.of(values)
    assert "\n" not in str(caught.value)


def test_the_host_holds_whole_blocks() -> None:
    settings = CrossPointSettings(threshold_tokens=8, host_bytes=1000)
    assert settings.host_blocks(300) == 3
    with pytest.raises(ProfileError, match="host_bytes is 1000, a KV block 1001"):
        settings.host_blocks(1001)
