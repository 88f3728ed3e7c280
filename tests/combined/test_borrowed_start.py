"""The experiment's parts: a relay that keeps its settings and a summary of rows made by hand."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from firsttoken_studies.combined.borrowed.neighbour import shaped
from firsttoken_studies.nb56_a_start_that_borrows import borrowed_start as experiment
from firsttoken_studies.nb56_a_start_that_borrows.borrowed_start import borrowed_start_summary
from firsttoken_studies.record.results import Result


@pytest.fixture
def echo():
    """The port of a server that says what it is told."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            with one:
                while data := one.recv(1 << 16):
                    one.sendall(data)

    threading.Thread(target=answer, daemon=True).start()
    yield f"127.0.0.1:{listening.getsockname()[1]}"
    listening.close()


def exchanged(address: str, size: int) -> float:
    """Seconds until ``size`` bytes have come back, over a connection that is there."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as one:
        one.sendall(b"x")
        assert one.recv(1) == b"x"
        begun = time.monotonic()
        threading.Thread(target=one.sendall, args=(bytes(size),), daemon=True).start()
        left = size
        while left:
            left -= len(one.recv(1 << 16))
        return time.monotonic() - begun


def test_a_relay_is_never_faster_than_it_is_set(echo):
    """Whether it is slower is the machine's affair, and no test of ours."""
    with shaped(echo, rtt_ms=40, gbit_per_s=0) as address:
        assert exchanged(address, 1) >= 0.04
    with shaped(echo, rtt_ms=0, gbit_per_s=0.016) as address:
        assert exchanged(address, 1 << 18) >= (1 << 18) / 2e6


def start(variant: str, rtt: float, round_: int, ttft: float, tokens: list[int], **more) -> dict:
    row = {"what": "start", "variant": variant, "gbit_per_s": 1, "rtt_ms": rtt, "round": round_, "ttft_request_s": ttft}
    times = [ttft + 0.1 * n for n in range(len(tokens))]
    told = {
        "ttft_process_s": 1.0 + ttft,
        "loaded_s": 2.0,
        "local_s": None,
        "lent_bytes": 0,
        "lent_steps": 0,
        "gone": "",
        "taken": [],
    }
    return row | {"tokens": tokens, "times_s": times} | told | more


LENT = {"local_s": 2.2, "lent_bytes": 3_000_000, "gone": "all layers are here", "taken": [(1.0, 3), (2.2, 6)]}
ROWS = [
    *(start("whole", 0.0, n, 2.0, [1, 2, 3]) for n in range(2)),
    *(start("pruned", 0.0, n, 1.6, [1, 9, 9]) for n in range(2)),
    *(start("borrowed", 5, n, 0.8, [1, 2, 3], **LENT) for n in range(2)),
    *(
        {"what": "neighbour", "beside": name, "round": 0, "seconds": 2.0, "tokens": tokens}
        for name, tokens in (("alone", 100), ("whole", 95), ("borrowed", 60))
    ),
]
ASKED = {"gbit_per_s": [1], "rtt_ms": [5], "main_gbit_per_s": 1, "main_rtt_ms": 5, "tokens": 3}


WHOSE = {"variant": "borrowed", "than": "whole"}


def test_the_summary_of_starts_made_by_hand():
    said = borrowed_start_summary(ROWS, {"borrowed": ASKED})
    over = WHOSE | {"gbit_per_s": 1, "rtt_ms": 5}
    assert said.value("ttft_x", **over) == pytest.approx(0.4)
    assert said.value("last_token_x", **over) == pytest.approx(1.0 / 2.2)
    assert said.value("loaded_x", **over) == pytest.approx(1.1)
    lent = [said.value(name, variant="borrowed", gbit_per_s=1, rtt_ms=5) for name in ("lent_mb", "lent_tokens")]
    assert lent == [3, 3]
    assert [entry["value"] for entry in said.all("same_tokens_pct")] == [0, 100]
    assert said.value("same_first_token_pct", variant="pruned", than="whole") == 100
    assert [entry["value"] for entry in said.all("neighbour_lost_pct")] == pytest.approx([5, 40])
    assert said.value("loans_that_failed") == 0


def test_a_token_that_is_not_the_whole_models_is_counted():
    rows = [*ROWS, start("borrowed", 5, 2, 0.8, [1, 2, 4], **LENT | {"gone": "it died"})]
    said = borrowed_start_summary(rows, {"borrowed": ASKED})
    assert said.value("same_tokens_pct", **WHOSE) == pytest.approx(200 / 3)
    assert said.value("loans_that_failed") == 1


def test_figures_and_tables_are_drawn_from_a_result_alone():
    summary = borrowed_start_summary(ROWS, {"borrowed": ASKED})
    result = Result(
        "borrowed_start", "quick", {"borrowed": ASKED}, {"slug": "x"}, {}, "", [0], "2026", 0.0, {}, ROWS, {}, summary
    )
    assert len(experiment.first_tokens(None, result).axes) == 1 and len(experiment.taking_over(None, result).axes) == 2
    assert next(experiment.start_rows(None, result))["over whole"].startswith("0.40")
    assert [row["first token, s"][:4] for row in experiment.creation_rows(None, result)] == ["3.00", "2.60", "1.80"]
    assert [row["starts"] for row in experiment.whose_rows(None, result)] == [2, 2]
    assert list(experiment.neighbour_rows(None, result))[2]["lost, %"].startswith("40.0")
