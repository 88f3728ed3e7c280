"""Training through frozen servers: gradients are the local model's, clients do not disturb each other, folders are
PEFT's own. Held to 1e-4 of the largest value of each gradient, in float32."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

from firsttoken.assets.models import load_model
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import MOST_TOKENS
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.tuning.client_adapters import Lora, SoftPrompt
from firsttoken.petals.tuning.passes import Pass, decode_pass, encode_pass
from firsttoken.petals.tuning.remote_training import IGNORED, RemoteTraining
from firsttoken.study.errors import RequestError, SwarmError

NEAR = 1e-4
TIMEOUTS = Timeouts(step_s=5.0, refresh_s=30.0, ban_s=5.0, find_s=5.0, late_s=60.0)


def batch(seed: int, rows: int = 3, tokens: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, the last row shorter by a third."""
    ids = torch.randint(256, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[-1, 2 * tokens // 3 :] = IGNORED
    return ids, labels


def near(said: torch.Tensor, local: torch.Tensor) -> None:
    torch.testing.assert_close(said, local, atol=NEAR * float(local.abs().max()), rtol=0)


def made(config) -> tuple[SoftPrompt, Lora]:
    """A prompt of some size, LoRA whose second half is not zero."""
    prompt, lora = SoftPrompt(config, 4, seed=1), Lora(config, 2, 8.0, ["self_attn.q_proj", "mlp.down_proj"], seed=2)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        prompt.weight.copy_(torch.randn(prompt.weight.shape, generator=draw))
        for half in lora.b.values():
            half.copy_(0.3 * torch.randn(half.shape, generator=draw))
    return prompt, lora


def locally(folder, saved, ids, labels) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of stock transformers and PEFT with a saved folder, and its gradients by name."""
    model = PeftModel.from_pretrained(load_model(str(folder), with_tokenizer=False).model, saved)
    for name, one in model.named_parameters():
        one.requires_grad_("lora_" in name or "prompt" in name)
    logits = model(input_ids=ids).logits[:, -ids.shape[1] :]
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
    loss.backward()
    return float(loss.detach()), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.fixture
def train(folder, here):
    """A client of servers that train, closed after the test."""
    clients = []

    def make(door: str, timeouts: Timeouts = TIMEOUTS, **trained) -> RemoteTraining:
        clients.append(RemoteTraining(folder, [door], timeouts=timeouts, **trained))
        return clients[-1]

    yield make
    for one in clients:
        one.close()


@pytest.fixture
def door(here) -> str:
    return here.serve((0, 2), (2, 4), (4, 6), trains=True)[0].record.address


def test_gradients_and_folders_are_those_of_peft(train, door, folder, tiny, tmp_path):
    """A soft prompt and LoRA, each alone as PEFT has them."""
    ids, labels = batch(0)
    for kind, trained in zip(("prompt", "lora"), made(tiny.config), strict=True):
        model = train(door, **{kind: trained})
        loss = model.loss(ids, labels)
        loss.backward()
        model.save(tmp_path)
        said, gradients = locally(folder, tmp_path / kind, ids, labels)
        assert float(loss.detach()) == pytest.approx(said, rel=1e-5)
        if kind == "prompt":
            near(trained.weight.grad, next(iter(gradients.values())))
        else:
            assert len(gradients) == 2 * len(trained.places)
            for (layer, name), (a, b) in trained.adapters().items():
                for half, one in (("A", a), ("B", b)):
                    found = next(v for k, v in gradients.items() if f"layers.{layer}.{name}.lora_{half}." in k)
                    near(one.grad, found)
        assert json.loads((tmp_path / kind / "recipe.json").read_text()) == {"base_sha256": model.sha256}
        assert model.chain.faults == []


def test_a_batch_of_several_messages_and_a_head_of_ones_own(train, door, tiny):
    ids = torch.randint(256, (5, MOST_TOKENS // 2 - 10), generator=torch.Generator().manual_seed(1))
    prompt, _ = made(tiny.config)
    model, head = train(door, prompt=prompt), torch.nn.Linear(32, 3)
    loss = F.cross_entropy(head(model.hidden(ids)[:, -1]), torch.tensor([0, 1, 2, 1, 0]))
    loss.backward()
    said, of_head = prompt.weight.grad.clone(), head.weight.grad.clone()
    prompt.weight.grad = head.weight.grad = None
    rows = torch.cat([prompt.weight.expand(5, -1, -1), model.model.model.embed_tokens(ids)], 1)
    local = tiny.model(inputs_embeds=rows, use_cache=False).last_hidden_state
    F.cross_entropy(head(local[:, -1]), torch.tensor([0, 1, 2, 1, 0])).backward()
    near(said, prompt.weight.grad)
    near(of_head, head.weight.grad)
    with pytest.raises(RequestError, match=f"at most {MOST_TOKENS} are trained on"):
        model.hidden(torch.zeros(1, MOST_TOKENS + 1, dtype=torch.long))


def test_two_clients_at_once_do_not_disturb_each_other(train, door, tiny):
    """Each learns what it learns alone: the same losses, step by step."""

    def learn(seed: int) -> list[float]:
        _, lora = made(tiny.config)
        model, (ids, labels) = train(door, lora=lora), batch(seed)
        optimiser, losses = torch.optim.Adam(lora.parameters(), 0.01), []
        for _ in range(5):
            optimiser.zero_grad()
            loss = model.loss(ids, labels)
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
        return losses

    alone = {seed: learn(seed) for seed in (5, 6)}
    together: dict[int, list[float]] = {}
    threads = [threading.Thread(target=lambda seed=seed: together.update({seed: learn(seed)})) for seed in (5, 6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for seed, losses in alone.items():
        assert losses[-1] < losses[0]
        assert together[seed] == pytest.approx(losses, rel=1e-4)


def test_a_server_that_fails_between_forward_and_backward_is_replaced(train, here, tiny):
    """By two of other blocks, so that what entered the second is computed on the way back; those that do not train
    are passed by."""
    first = here.serve((0, 3))[0].record.address
    here.serve((0, 3), peers=[first], trains=True)
    gone = here.serve((3, 6), peers=[first], trains=True)[0]
    prompt, lora = made(tiny.config)
    patient = replace(TIMEOUTS, find_s=60.0)  # servers start meanwhile, on a machine that may do other work
    model, (ids, labels) = train(first, patient, prompt=prompt, lora=lora), batch(2)
    model.loss(ids, labels).backward()
    whole = {name: one.grad.clone() for name, one in [*prompt.named_parameters(), *lora.named_parameters()]}
    prompt.zero_grad()
    lora.zero_grad()
    loss = model.loss(ids, labels)

    def broken(*_: object) -> None:
        raise RuntimeError("out of memory")

    gone.frozen.run = broken
    before = len(model.chain.faults)
    with ThreadPoolExecutor(1) as pool:
        backward = pool.submit(loss.backward)
        while not model.chain.faults[before:] and not backward.done():
            time.sleep(0.01)
        # not before: a client goes by what it has timed, and may have gone by these two from the first
        here.serve((3, 5), (5, 6), peers=[first], trains=True)
        backward.result()
    refused, failed = "this server does not train: start one with --train", "the blocks failed: out of memory"
    assert failed in {why for _, why in model.chain.faults[before:]}
    assert {why for _, why in model.chain.faults} <= {failed, refused}  # which server is asked first is the clock's
    for name, one in [*prompt.named_parameters(), *lora.named_parameters()]:
        near(one.grad, whole[name])


def test_nobody_trains(here, train, tiny):
    door = here.serve((0, 6))[0].record.address
    model = RemoteTraining(here.folder, [door], timeouts=Timeouts(find_s=0.2, ban_s=0.1))
    with pytest.raises(SwarmError, match=r"does not train: start one with --train .the servers that took over failed"):
        model.hidden(torch.tensor([[1, 2]]))
    here.serve((0, 6), peers=[door], trains=True)  # whoever tries again is as patient as before
    wait_for(model.chain.swarm.refresh())
    assert torch.isfinite(model.hidden(torch.tensor([[1, 2]]))).all()
    model.close()


def test_what_no_pass_is_is_refused(tiny):
    hidden = torch.ones(2, 3, 32)
    good = Pass(hidden, {(1, "mlp.up_proj"): (torch.ones(2, 32), torch.ones(64, 2))}, 2.0, hidden.clone())
    read = decode_pass(encode_pass(good), 32)
    assert read.scaling == 2.0 and torch.equal(read.gradient, hidden) and list(read.adapters) == [(1, "mlp.up_proj")]
    for wrong, said in (
        (Pass(hidden[:, :, :16], {}), r"hidden of \[6, 16\] does not fit"),
        (Pass(hidden, {(1, "x"): (torch.ones(2, 32), torch.ones(64, 3))}), "is not two halves of one rank"),
        (Pass(hidden, {(1, "../x"): (torch.ones(2, 32), torch.ones(64, 2))}), "neither hidden states nor a half"),
        (Pass(torch.ones(2, MOST_TOKENS, 32), {}), "at most 512 are taken at once"),
    ):
        with pytest.raises(SwarmError, match=said):
            decode_pass(encode_pass(wrong), 32)
    with pytest.raises(SwarmError, match="no safetensors of a pass"):
        decode_pass(b"\x00" * 40, 32)


def test_lora_that_fits_no_module_is_refused(train, door, tiny):
    _, lora = made(tiny.config)
    model = train(door, lora=lora)
    lora.a["0/self_attn/q_proj"] = torch.nn.Parameter(torch.ones(2, 31))
    with pytest.raises(RequestError, match=r"refuses: LoRA of self_attn.q_proj in layer 0 does not fit its module"):
        model.hidden(torch.tensor([[1, 2]]))
    with pytest.raises(SwarmError, match=r"LoRA can be added to self_attn.q_proj, .* not to norm"):
        Lora(tiny.config, modules=["norm"])
