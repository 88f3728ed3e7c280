"""A live peer without one: command lines, what aiperf wrote, the summary by hand, and that every process is ended."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import TIMEOUT_S, until

from firsttoken.__main__ import COMMANDS
from firsttoken.options import parser
from firsttoken.study.errors import FirstTokenError, ProfileError
from firsttoken.study.profile import load_profile
from firsttoken_studies.nb45_beside_vllm import figures
from firsttoken_studies.nb45_beside_vllm import study as live_peer
from firsttoken_studies.nb45_beside_vllm.study import METRICS, OURS, VLLM, PeerConfig, PeerModel, peer_summary
from firsttoken_studies.probes.programs import free_port, started, wait_healthy

CONFIG = {"budgets": (64, 256), "requests": 4, "rate": 2.0, "prompt_tokens": 64, "prompt_spread": 16}
CONFIG |= {"new_tokens": 8, "rounds": 2}
LOAD = PeerConfig(**CONFIG)
TIMES = {"unit": "ms", "avg": 20.0, "p50": 15.0, "p99": 90.0, "min": 1.0}
EXPORT = {
    "schema_version": "1.4",
    "request_count": {"unit": "requests", "avg": 4.0},
    "input_sequence_length": {"unit": "tokens", "avg": 63.5},
    "output_sequence_length": {"unit": "tokens", "avg": 8},
    "output_token_throughput": {"unit": "tokens/sec", "avg": 12.5},
    "time_to_first_token": TIMES,
    "inter_token_latency": TIMES | {"p99": 30.0},
    "inter_chunk_latency": TIMES | {"p99": 60.0},
    "request_latency": TIMES | {"p50": 1500.0},
    "error_summary": [],
    "is_complete": True,
}
FAILED = {"error_details": {"code": 429, "type": "Too Many Requests"}, "count": 1}
HEALTHY = """
import http.server, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, sys.argv[0]])
    open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


@pytest.fixture
def model(tmp_path: Path) -> PeerModel:
    return PeerModel(tmp_path / "model", "bfloat16", 2, 2000, 100)


def options_of(command: list[str]) -> dict[str, str]:
    words = command[command.index("--host") if "--host" in command else 2 :]
    return {key: value for key, value in zip(words, [*words[1:], ""], strict=True) if key.startswith("--")}


def test_both_servers_are_told_the_same(model: PeerModel) -> None:
    for budget, running in ((32, 32), (256, 64)):
        ours, theirs = live_peer.our_command(model, budget, 80), live_peer.vllm_command(model, budget, 81)
        asked = parser(COMMANDS).parse_args(ours[ours.index("firsttoken") + 1 :])
        assert (asked.folder, asked.host, asked.port) == (model.folder, "127.0.0.1", 80)
        assert (asked.token_budget, asked.max_running, asked.kv_blocks) == (budget, running, 32_768 // 16)
        told = options_of(theirs)
        assert (told["--max-num-batched-tokens"], told["--max-num-seqs"]) == (str(budget), str(running))
        assert (told["--dtype"], told["--max-model-len"], told["--port"]) == ("bfloat16", "2000", "81")
        assert told["--kv-cache-memory-bytes"] == str(32_768 * 100)
        assert "--no-enable-prefix-caching" in theirs and not asked.share_prefixes


def test_without_a_compiler_vllm_does_not_compile(model: PeerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "--enforce-eager" in live_peer.vllm_command(model, 64, 80)


def test_no_key_reaches_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTTOKEN_API_KEY", "sk-mine")
    found = live_peer.environment(2)
    assert "FIRSTTOKEN_API_KEY" not in found and found["OMP_NUM_THREADS"] == "2"


def test_every_server_of_a_round_is_asked_the_same(model: PeerModel, tmp_path: Path) -> None:
    one, other = (
        live_peer.aiperf_command(f"http://127.0.0.1:{port}", model.folder, LOAD, 3, tmp_path) for port in (1, 2)
    )
    assert [words for words in zip(one, other, strict=True) if len(set(words)) > 1] == [
        ("http://127.0.0.1:1", "http://127.0.0.1:2")
    ]
    assert options_of(one) | {"--random-seed": "3", "--model": "model", "--isl-stddev": "16"} == options_of(one)


def test_what_aiperf_wrote(tmp_path: Path) -> None:
    (file := tmp_path / "export.json").write_text(json.dumps(EXPORT))
    row = live_peer.answers(file, 4)
    assert (row["ttft_mean_s"], row["ttft_p50_s"], row["ttft_p99_s"]) == (0.02, 0.015, 0.09)
    assert (row["itl_p99_s"], row["gap_p99_s"], row["latency_p50_s"]) == (0.03, 0.06, 1.5)
    assert (row["requests"], row["errors"], row["tokens_per_s"], row["prompt_tokens"]) == (4, 0, 12.5, 63.5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"error_summary": [FAILED], "error_request_count": {"avg": 1}}, "1 errors; the first error: .*429"),
        ({"request_count": {"avg": 3}}, "3 answers to 4 requests and 0 errors$"),
        ({"is_complete": False}, "4 answers to 4 requests"),
        ({"time_to_first_token": TIMES | {"unit": "s"}}, "export.json: time_to_first_token.unit: .*; run live_peer"),
        ({"inter_token_latency": None}, "export.json: inter_token_latency"),
    ],
)
def test_an_error_that_aiperf_saw_is_one_line(changed: dict, message: str, tmp_path: Path) -> None:
    (file := tmp_path / "export.json").write_text(json.dumps(EXPORT | changed))
    with pytest.raises(FirstTokenError, match=message) as raised:
        live_peer.answers(file, 4)
    assert "\n" not in str(raised.value)


def test_an_export_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FirstTokenError, match=r"export\.json cannot be read"):
        live_peer.answers(tmp_path / "export.json", 4)


def test_an_aiperf_that_fails_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('first', flush=True); raise SystemExit('no route to the server')"]
    with pytest.raises(FirstTokenError, match=r"^live_peer: aiperf ended with 1: no route to the server$"):
        live_peer.ask(command, LOAD, tmp_path, dict(os.environ))


def test_an_environment_that_is_missing(model: PeerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_peer, "VLLM_PYTHON", tmp_path / "python")
    with pytest.raises(FirstTokenError, match=r"^live_peer: vLLM's environment is missing; run env/vllm/setup\.sh$"):
        live_peer.turn(OURS, model, 64, LOAD, 3)
    (tmp_path / "python").touch()
    monkeypatch.setattr(live_peer, "AIPERF", tmp_path / "aiperf")
    with pytest.raises(
        FirstTokenError, match=r"^live_peer: aiperf's environment is missing; run env/clients/setup\.sh$"
    ):
        live_peer.turn(OURS, model, 64, LOAD, 3)


def gone(pid: int) -> bool:
    """Whether it has ended; one that nobody has waited for yet has, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_server_is_ended_when_aiperf_fails(model: PeerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []

    @contextmanager
    def noted(*arguments):
        with started(*arguments) as process:
            processes.append(process)
            yield process

    monkeypatch.setattr(live_peer.paths, "CACHE", tmp_path)
    for name in ("VLLM_PYTHON", "AIPERF"):
        monkeypatch.setattr(live_peer, name, Path(sys.executable))
    monkeypatch.setattr(live_peer, "started", noted)
    fake = {OURS: lambda model, budget, port: [sys.executable, "-c", HEALTHY, str(port)]}
    monkeypatch.setattr(live_peer, "COMMANDS", fake)
    with pytest.raises(FirstTokenError, match="aiperf ended with 2"):  # there is no script `profile`
        live_peer.turn(OURS, model, 64, LOAD, 3)
    server, _aiperf = processes
    assert server.returncode == -15 and list(tmp_path.iterdir()) == []


def test_who_does_not_listen_is_killed_with_its_children(tmp_path: Path) -> None:
    (script := tmp_path / "stubborn.py").write_text(STUBBORN)
    told = tmp_path / "told"
    with (
        pytest.raises(KeyboardInterrupt),
        started([sys.executable, str(script), str(told)], tmp_path / "log", os.environ, ending_s=0.2),
    ):
        until(lambda: told.exists() and told.read_text().count(" "), "both are there")
        raise KeyboardInterrupt
    until(lambda: all(map(gone, map(int, told.read_text().split()))), "both are gone")


def test_a_server_that_does_not_come_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for code, patience_s, message in (
        ("raise SystemExit('no such model')", TIMEOUT_S, "the server ended: no such model"),
        ("import time; print('still', flush=True); time.sleep(60)", 0.5, "the server did not answer in 0.5 s: "),
    ):
        with (
            pytest.raises(FirstTokenError, match=message),
            started([sys.executable, "-c", code], log, os.environ) as process,
        ):
            wait_healthy(process, free_port(), patience_s, log, "the server")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"budgets": ()}, "at least 1"),
        ({"budgets": (64, 0)}, "at least 1"),
        ({"budgets": (64, 64)}, "twice"),
        ({"rate": 0.0}, "rate above 0"),
        ({"new_tokens": 1}, "new_tokens 2"),
        ({"prompt_tokens": 2000}, "takes 2048 tokens .* 2064"),
        ({"new_tokens": 513}, "gives 512"),
    ],
)
def test_a_configuration_that_cannot_be(wrong: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message) as raised:
        PeerConfig(**CONFIG | wrong)
    assert "\n" not in str(raised.value)


def test_every_round_has_every_turn_in_an_order_of_its_own() -> None:
    turns = PeerConfig(**CONFIG | {"budgets": (64, 256, 1024), "rounds": 3}).turns(0)
    rounds = [[pair for number, *pair in turns if number == which] for which in range(3)]
    assert all(sorted(pairs) == sorted(rounds[0]) and len(pairs) == 6 for pairs in rounds)
    assert rounds[0] != rounds[1] and turns == PeerConfig(**CONFIG | {"budgets": (64, 256, 1024), "rounds": 3}).turns(0)


def test_a_model_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"^live_peer: random:tiny has no tokenizer"):
        live_peer.live_peer(
            load_profile("full", model="random:tiny", **{"live_peer.prompt_spread": 4, "live_peer.prompt_tokens": 64})
        )


def made(system: str, budget: int, number: int, **columns: float) -> dict:
    row = {column: 1.0 for column, _, _ in METRICS.values()} | columns
    return {"system": system, "budget": budget, "round": number} | row


def test_the_summary_by_hand() -> None:
    rows = [
        *(made(OURS, 64, n, itl_p99_s=0.02, ttft_p50_s=2.0, tokens_per_s=[10, 20, 30][n]) for n in range(3)),
        *(made(OURS, 256, n, itl_p99_s=[0.03, 0.04, 0.06][n], ttft_p50_s=1.0, tokens_per_s=40) for n in range(3)),
        *(made(VLLM, 64, n, itl_p99_s=0.01, ttft_p50_s=0.5, tokens_per_s=10) for n in range(3)),
        *(made(VLLM, 256, n, itl_p99_s=[0.03, 0.02, 0.04][n], ttft_p50_s=1.5, tokens_per_s=5) for n in range(3)),
    ]
    found = peer_summary(rows[::-1], {"live_peer": {"budgets": [64, 256]}})
    over = found.of("itl_p99_x", engine=OURS, than=VLLM, budget_tokens=256)
    assert {name: over[name] for name in ("value", "low", "high")} == pytest.approx(
        {"value": 1.5, "low": 1.0, "high": 2.0}
    )
    assert (over["n"], over["unit"], over["range"]) == (3, "x", True)
    assert found.value("itl_p99_s", engine=OURS, budget_tokens=256) == 0.04
    assert found.of("ttft_p50_s", engine=VLLM, budget_tokens=64)["unit"] == "s"
    best = {"engine": OURS, "than": VLLM, "case": "each at its best budget"}
    assert found.value("ttft_p50_x", **best) == 2.0  # 256 tokens for one, 64 for the other
    assert [found.value("ttft_p50_best_budget_tokens", engine=system) for system in (OURS, VLLM)] == [256, 64]
    assert found.value("tokens_per_s_x", **best) == 4.0
    assert found.value("tokens_per_s", engine=OURS, budget_tokens=64) == 20


def test_the_figure_and_the_table() -> None:
    import matplotlib

    matplotlib.use("Agg")
    rows = [
        made(system, budget, number, itl_p99_s=0.02 + number / 100, ttft_p50_s=2.0 if system == OURS else 4.0)
        for system in (OURS, VLLM)
        for budget in (64, 256)
        for number in range(3)
    ]
    parameters = {"live_peer": {"budgets": [64, 256]}}
    result = SimpleNamespace(rows=rows, parameters=parameters, summary=peer_summary(rows, parameters))
    first, *_, last = figures.peer_rows(result)
    assert first["tokens a step"] == "64: firsttoken serve" and first["P99 ITL, ms"] == "30.0 [20.0, 40.0]"
    assert last["tokens a step"] == "each at its best: over vLLM" and last["P50 TTFT, s"] == "0.50 [0.50, 0.50]"
    fig = figures.beside(result)
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["firsttoken serve", "vLLM"]
    drawn = {round(float(y), 6) for line in fig.axes[1].lines for y in line.get_ydata()}
    assert drawn == {20.0, 30.0, 40.0}
