"""A run on two cards: every source of costs serves the same requests."""

from __future__ import annotations

import json

from firsttoken.engine.costs.sarathi_artifact import BatchCosts
from firsttoken.study.profile import load_profile
from firsttoken_studies.sarathi import two_cards as study
from firsttoken_studies.sarathi.two_cards import SOURCES, two_cards, two_cards_summary


def test_each_source_serves_what_vllm_served(tmp_path, monkeypatch):
    served = {"input_toks": 9, "output_toks": 3, "queued_ts": 5.0, "first_token_ts": 5.5, "last_token_ts": 6.5}
    (tmp_path / "vllm_requests.jsonl").write_text("\n".join([json.dumps(served)] * 2))
    monkeypatch.setattr(study, "downloaded", lambda name: tmp_path)
    monkeypatch.setattr(study, "sources", lambda config: (dict.fromkeys(SOURCES, BatchCosts()), 100))
    found = two_cards(load_profile("full"))
    assert [row["run"] for row in found.rows] == [name for name in ("vllm", *SOURCES) for _ in range(2)]
    worst = [two_cards_summary(found.rows, {}).value("off_pct", costs=s, than="vllm", across="worst") for s in SOURCES]
    assert len(set(worst)) == 1, "the same costs are off by the same"
