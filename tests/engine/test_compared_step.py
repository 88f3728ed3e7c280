"""A step that is compared before a model is said to be served: what is another model, and what is only rounded."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from families import PROMPT, write_family
from services import free_port
from transformers import AutoModelForCausalLM, DeepseekV3Config, DiffLlamaConfig, StableLmConfig

from firsttoken.__main__ import main
from firsttoken.assets.servable import check_servable
from firsttoken.engine import compared_step
from firsttoken.engine.compared_step import (
    TOLERANCES,
    Comparison,
    Reference,
    check_rows,
    lean_rows,
    prompt_of,
    reference_rows,
)
from firsttoken.engine.decoder import LocalSegment
from firsttoken.engine.executor import Limits
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link
from firsttoken.petals.block_backend import BlockBackend
from firsttoken.progressiveserve.checkpoint.plan import staged
from firsttoken.progressiveserve.checkpoint.sources import FolderSource
from firsttoken.progressiveserve.checkpoint.writer import write_staged
from firsttoken.progressiveserve.stages import StagePlan
from firsttoken.study.errors import FirstTokenError, ModelError
from firsttoken_serve.retrying_server import StagedService
from firsttoken_serve.served_model import PlainServer

SMALL = {
    **{"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0},
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4}


@pytest.fixture(autouse=True)
def own_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was compared before counts."""
    monkeypatch.setattr(compared_step, "NOTES", tmp_path / "notes")
    monkeypatch.setattr(compared_step, "_PASSED", set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DiffLlamaConfig(**SMALL), "the diffllama model is another model here than by its own modules: a step differs"),
        (DeepseekV3Config(**(SMALL | LATENT)), "the deepseek_v3 model cannot be run here: Sizes of tensors must match"),
        (StableLmConfig(**SMALL), "StableLmAttention was called without an engine's step"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_the_engine_takes_no_model_that_is_another_in_it(config, reason, dtype) -> None:
    """The model has its own attention again afterwards."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for _ in range(2):  # what failed is not noted as right
        with pytest.raises(ModelError, match=reason) as caught:
            LiveExecutor(model, 4)
        assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == "sdpa"


def test_what_is_computed_once_more_in_half_precision_is_no_other_model(tmp_path: Path) -> None:
    """Experts that one rounding changes move the logits by a third: more than the tolerance, less than twice what a
    rounding of the embeddings does."""
    model = AutoModelForCausalLM.from_pretrained(
        write_family("granitemoe", tmp_path / "m"), dtype=torch.bfloat16
    ).eval()
    reference = reference_rows(model, prompt_of(Limits(64, 300)))
    assert reference.rounding > TOLERANCES[torch.bfloat16]
    LiveExecutor(model, 4).close()


def test_rows_are_told_from_others_by_their_spread() -> None:
    reference = Reference(torch.randn(5, 300, generator=torch.Generator().manual_seed(1)))
    check_rows("it", lambda: reference.rows + 1e-4, reference, torch.float32)
    check_rows(
        "it", lambda: reference.rows * torch.tensor([9.0, 9.0, 1.0, 1.0, 1.0])[:, None], reference, torch.float32
    )
    with pytest.raises(ModelError, match=r"it is another model here .* a step differs by 0\.01 of the spread of its"):
        check_rows("it", lambda: reference.rows * 1.01, reference, torch.float32)
    with pytest.raises(ModelError, match="differs by inf"):
        check_rows("it", lambda: reference.rows * torch.nan, reference, torch.bfloat16)
    check_rows(
        "it", lambda: reference.rows, reference._replace(rows=reference.rows * torch.nan), torch.float32
    )  # of spoilt weights


def test_it_is_compared_once_for_the_same_files(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 300_000)
    first = Comparison([file], "float32")
    assert first.due
    first.mark_passed()
    assert not first.due and not Comparison([file], "float32").due and Comparison([file], "bfloat16").due
    compared_step._PASSED.clear()  # as in another process
    assert not Comparison([file], "float32").due
    file.write_bytes(b"a" * 299_999 + b"b")
    assert Comparison([file], "float32").due


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_lean_modules_one_layer_at_a_time_are_transformers(kind: str, tmp_path: Path) -> None:
    """Within 1e-5: they are equal bit by bit but for how many rows the head multiplies at once."""
    folder, prompt = write_family(kind, tmp_path / "m"), prompt_of(Limits(64, 300))
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = lean_rows(check_servable(folder), torch.float32, "cpu", prompt).rows
    assert rows == pytest.approx(reference_rows(stock, prompt).rows, abs=1e-5, rel=1e-5)


def ended(server: PlainServer | StagedService, faults: list[FirstTokenError]) -> FirstTokenError:
    """What ended ``server``, which nobody can ask any more then."""
    with closing(server):
        server.start()
        limit = time.monotonic() + 60
        while not faults and time.monotonic() < limit:
            assert server.status()["state"] != "complete"
            time.sleep(0.01)
        assert server.status()["state"] == "failed"
        with pytest.raises(ModelError, match="another model here"):
            server.submit(PROMPT, 2)
    return faults[0]


def wrong_layers(self: LocalSegment, hidden: torch.Tensor, step: object, right=LocalSegment.run) -> torch.Tensor:
    """As a kernel that this machine computes wrongly."""
    return right(self, hidden, step).roll(1, -1)


@pytest.mark.parametrize("kind", ["llama", "smollm3"])
@pytest.mark.parametrize("way", ["serve", "stage"])
def test_a_service_ends_with_one_line_where_a_step_is_another(way, kind, tmp_path, monkeypatch) -> None:
    folder, faults = write_family(kind, tmp_path / "m"), list[FirstTokenError]()
    if way == "stage":
        source = FolderSource(folder)
        write_staged(source, staged(source.names, StagePlan.from_block(8, (2, 3))), tmp_path / "staged")
    monkeypatch.setattr(LocalSegment, "run", wrong_layers)
    limits = RequestLimits(max_model_len=64)
    if way == "stage":
        server = StagedService(tmp_path / "staged", [Link()], limits, broken=faults.append)
    else:
        server = PlainServer(folder, limits, device="cpu", broken=faults.append)
    fault = ended(server, faults)
    assert "is another model here than by its own modules: a step differs by 1" in str(fault)
    assert isinstance(fault, ModelError) and "\n" not in str(fault)
    assert not (tmp_path / "notes").exists()


def test_a_span_is_not_served_where_a_step_is_another(tmp_path, monkeypatch) -> None:
    folder = write_family("llama", tmp_path / "m")
    backend = BlockBackend(folder, range(3, 8), torch.float32, 64)
    monkeypatch.setattr(LocalSegment, "run", wrong_layers)
    BlockBackend(folder, range(3, 8), torch.float32, 64)  # it was compared
    with pytest.raises(
        ModelError, match=r"^\[2, 8\) of m is another model here than by its own modules: a step differs"
    ):
        BlockBackend(folder, range(2, 8), torch.float32, 64)
    with pytest.raises(ModelError, match=r"^\[1, 6\) of m is another model here"):
        backend.move(range(1, 6))


@pytest.mark.parametrize("command", ["serve", "swarm serve"])
def test_the_command_ends_with_status_2_and_one_line(command, tmp_path, monkeypatch, capsys) -> None:
    folder = write_family("llama", tmp_path / "m")
    monkeypatch.setattr(LocalSegment, "run", wrong_layers)
    capsys.readouterr()
    where = [str(folder)] if command == "serve" else ["--model", str(folder), "--blocks", "2:8", "--dtype", "float32"]
    assert main([*command.split(), *where, "--port", str(free_port())]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("firsttoken: ") and "is another model here than by its own modules: a step differs" in last
