"""The code calls the oldest releases that pyproject.toml admits as they want to be called."""

from __future__ import annotations

import oldest_signatures
import pytest
import yaml
from oldest_signatures import OPEN, TABLE, calls, calls_in, lower_bounds

AGAIN = "run tests/support/oldest_signatures.py"


@pytest.fixture(scope="module")
def table() -> dict:
    return yaml.safe_load(TABLE.read_text(encoding="utf-8"))


def test_the_table_is_of_the_lower_bounds(table: dict) -> None:
    assert table["read_from"] == lower_bounds(), f"pyproject.toml admits other releases than were read; {AGAIN}"


def unknown(call: oldest_signatures.Call, taken: dict[str, str]) -> str | None:
    """What a call says that the oldest release does not take, in words; None where it takes all."""
    if call.name not in taken:
        return f"{call.where}: {call.name} is not in {TABLE.name}; {AGAIN}"
    odd = sorted(call.keywords - {*taken[call.name].split()})
    return f"{call.where}: {call.name} takes no {', '.join(odd)}" if odd and taken[call.name] != OPEN else None


def test_every_keyword_exists_in_the_oldest_release(table: dict) -> None:
    faults = [fault for call in calls({*table["read_from"]}) if (fault := unknown(call, table["taken"]))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    "text",
    [
        "from torch.nn.attention.varlen import varlen_attn\nvarlen_attn(q, k, v, enable_gqa=True)",
        "import torch.nn.attention.varlen as v\nv.varlen_attn(q, k, v, enable_gqa=True)",
        "import torch\ntorch.nn.attention.varlen.varlen_attn(q, k, v, enable_gqa=True)",
        "def f():\n    from transformers import ContinuousBatchingConfig as C\n    return C(page_size=32)",
    ],
)
def test_what_only_newer_releases_take_is_found(text: str, table: dict) -> None:
    (call,) = calls_in(text, "x.py", {*table["read_from"]})
    assert "takes no" in unknown(call, table["taken"]) or "is not in" in unknown(call, table["taken"])
