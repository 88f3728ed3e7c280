"""The picture at the head of the README stands on the record and the ledger, and says what it lacks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from firsttoken.study.errors import FirstTokenError
from firsttoken_studies import ledger
from firsttoken_studies.nb01_the_first_token.study import Lengths, Work, by_length_figure, roofline, timeline
from firsttoken_studies.nb90_claims import figures, findings
from firsttoken_studies.record.verdicts import Verdict

REPORTS = ["ProgressiveServe", "CPS", "Sarathi-Serve", "DroidSpeak", "PETALS"]


def test_each_report_has_a_panel_with_its_own_number():
    made = findings.panels(ledger.claims(), ledger.recorded(), ledger.machine())
    assert [panel.report for panel in made] == REPORTS
    said = {claim.id: claim.value for claim in ledger.claims()}
    reports = {panel.report: [bar.value for bar in panel.bars if bar.kind == findings.PAPER] for panel in made}
    assert reports["ProgressiveServe"] == [said["progressive.ttft"]] and reports["CPS"] == [said["cps.p99-below-swap"]]
    entries = [bar.found for panel in made for bar in panel.bars if isinstance(bar.found, dict)]
    assert all(entry["low"] <= entry["value"] <= entry["high"] for entry in entries if "low" in entry)


def test_a_finding_without_its_result_is_named():
    with pytest.raises(FirstTokenError, match="no result of 'cold_start'"):
        findings.panels(ledger.claims(), [r for r in ledger.recorded() if r.experiment != "cold_start"], "none")


def test_nothing_is_wider_than_the_picture():
    figure = findings.five_findings(ledger.claims(), ledger.recorded(), ledger.machine())
    figure.canvas.draw()
    width = figure.bbox.width
    for ax in figure.axes:
        assert ax.get_tightbbox().x1 <= 1.01 * width and ax.get_tightbbox().x0 >= -0.01 * width


def test_the_floors_of_notebook_01():
    work = Work(layer_weights=100, weight_bytes=400, token_bytes=20, operations_per_s=1000.0, bytes_per_s=200.0)
    assert (work.prefill_floor_s(10), work.decode_floor_s(0), work.decode_floor_s(10)) == (2.0, 2.0, 3.0)
    measured = Lengths({10: 3.0, 20: 5.0}, {10: 2.5, 20: 2.6})
    assert "below 5 operations a byte, and a decode has 0.5" in roofline(measured, work)._suptitle.get_text()
    assert len(by_length_figure(measured, work).axes) == 2
    phases = {"process": 0.1, "imports": 3.0, "load": 1.0, "prefill": 0.5, "decode": 2.0, "resume": 9.0}
    said = timeline(phases)._suptitle.get_text()
    assert said == "The parts add up to 4.6 s until the first token, 3.0 s of them 'imports'"


@pytest.mark.parametrize(
    ("op", "bound", "value", "better"),
    [
        (">=", 2.0, 3.0, 1.5),  # a gain of at least 2
        ("<=", 4.0, 2.0, 2.0),  # a cost of at most 4
        (">=", -3.0, -7.72, 3 / 7.72),  # a change of no less than -3: a loss of 7.72 is worse
        (">=", -3.0, -1.5, 2.0),
        (">=", -0.4, 0.8, 8.0),  # nothing is lost: the right edge
        ("<=", -5.0, -10.0, 2.0),  # a drop of at least 5
    ],
)
def test_a_bound_below_zero_is_a_loss(op: str, bound: float, value: float, better: float) -> None:
    claim = SimpleNamespace(kind="bound", op=op, value=bound)
    judged = SimpleNamespace(claim=claim, share=None, value=value, verdict=Verdict.REPRODUCED)
    assert figures._better(judged) == pytest.approx(better)
