"""Training through servers: gradients beside local ones, two clients at once, a server killed, seconds and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from firsttoken.assets.adapter_files import RECIPE
from firsttoken.assets.layers import layers_of
from firsttoken.assets.models import Loaded
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check, text_of
from firsttoken.petals.background import wait_for
from firsttoken.petals.blocks import model_sha256
from firsttoken.petals.patience import Patience
from firsttoken.petals.tuning.adapters import Lora
from firsttoken.petals.tuning.remote import RemoteTraining
from firsttoken.petals.wire import MOST_TOKENS
from firsttoken.study.errors import ProfileError
from firsttoken.study.measures import Entry, Summary
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.petals import tuning_tasks as tasks
from firsttoken_studies.petals.member import ServerProcess
from firsttoken_studies.petals.spans import running, split_evenly, stored
from firsttoken_studies.petals.tuning_tasks import HEAD, LORA, PROMPT, RATES, Trained, TunedStep

SAME = 1e-4  # of the largest value: what float32 may differ by
STOCK, ALONE, AT_ONCE, KILLED = "stock", "alone", "at_once", "killed"
HELD_TO = {ALONE: STOCK, AT_ONCE: ALONE, KILLED: ALONE}  # whose losses a run should have
LOCAL = 0  # servers: stock PEFT in the client's process
_PATIENCE = Patience(step_s=60.0, refresh_s=600.0, ban_s=600.0, find_s=60.0)


@dataclass(frozen=True)
class SwarmTuningConfig:
    """Two tasks of ``rows`` rows of ``tokens`` tokens, all of them in each of ``steps`` steps: LoRA of ``rank`` and a
    soft prompt of ``prompt_tokens``. A step is timed ``rounds`` times in turns, in this process and through ``chains``
    of as many servers; all else runs through the longest of them. Each process has ``threads`` (0: one a core).
    ProfileError for none."""

    rows: int
    tokens: int
    steps: int
    rank: int
    prompt_tokens: int
    chains: tuple[int, ...]
    rounds: int
    threads: int

    def __post_init__(self) -> None:
        ones = self.rows, self.rank, self.prompt_tokens, self.rounds, *self.chains
        if min(ones) < 1 or min(self.steps, self.tokens) < 2 or self.threads < 0:
            raise ProfileError("swarm_tuning: every number must be at least 1, steps and tokens at least 2")
        if self.tokens + self.prompt_tokens > MOST_TOKENS:
            raise ProfileError(f"swarm_tuning.tokens and prompt_tokens: at most {MOST_TOKENS} together")

    def needs(self) -> list[Need]:
        """The model has a block for each server, and the context; the text holds the rows."""
        return [
            Need("swarm_tuning.chains", max(self.chains), LAYERS),
            Need("swarm_tuning.tokens", self.tokens + self.prompt_tokens, CONTEXT),
            Need("swarm_tuning.rows x tokens", self.rows * self.tokens, text_of("train")),
        ]


def swarm_tuning(profile: Profile) -> Outcome:
    """Rows {what: gradient, kind, name, difference}, relative to the largest of the tensor; {what: chain, servers,
    round, block_share, seconds, bytes} of a step of LoRA; {what: loss, run, kind, step, loss, seconds}; {what: folder,
    kind, same_base, difference} of the loss that stock PEFT has with it. All in float32."""
    config = profile.section("swarm_tuning", SwarmTuningConfig)
    check(config.needs(), ModelFacts(profile.model))
    torch.set_num_threads(config.threads or torch.get_num_threads())
    with stored(profile) as (folder, loaded), ExitStack() as stack:
        depth, clients, ups = len(layers_of(loaded.model)), {}, []
        for servers in sorted(config.chains):
            spans = split_evenly(depth, servers)
            spare = spans[-1:] if servers == max(config.chains) else []
            ups = stack.enter_context(running(folder, [*spans, *spare], True, config.threads))
            clients[servers] = stack.enter_context(RemoteTraining(folder, [ups[0].address], patience=_PATIENCE))
        beside = stack.enter_context(RemoteTraining(folder, [ups[0].address], patience=_PATIENCE))
        study = _TuningStudy(folder, loaded, config, [clients[max(config.chains)], beside])
        study.gradients()
        study.chains(clients)
        study.curves()
        study.killed(ups)
    return Outcome(study.rows, provenance=loaded.provenance.as_dict())


class _TuningStudy:
    """Through ``clients`` of one chain, a kind each, and by stock PEFT."""

    def __init__(self, folder: Path, loaded: Loaded, config: SwarmTuningConfig, clients: list[RemoteTraining]) -> None:
        self.model, self.config, self.rows = loaded.model, config, []
        self.ids = tasks.windows(loaded, config.rows, config.tokens)
        self.clients = dict(zip(RATES, clients, strict=True))
        self.sha256, self._saved = model_sha256(folder), folder / "trained"

    def gradients(self) -> None:
        """Of all that a client may train, once, beside local ones."""
        for kind, client in self.clients.items():
            trained = self._start(kind, client)
            if isinstance(trained, Lora):  # at the start second halves are zero, and so are the first ones' gradients
                draw = torch.Generator().manual_seed(1)
                with torch.no_grad():
                    for half in trained.b.values():
                        half.copy_(0.02 * torch.randn(half.shape, generator=draw))
            client.loss(self.ids[kind], self.ids[kind]).backward()
            client.save(self._saved)
            with tasks.stock(self.model, self._saved / kind) as peft:
                tasks.stock_loss(peft, self.ids[kind]).backward()
                self._compare(kind, tasks.gradients(trained), tasks.stock_gradients(peft))
        ids, client = torch.cat([self.ids[LORA], self.ids[PROMPT]]), self.clients[LORA]
        client.lora, found = None, []
        with torch.no_grad():
            both = client.hidden(ids), self.model.model(input_ids=ids).last_hidden_state
        for hidden in both:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                head = nn.Linear(hidden.shape[-1], 2)
            tasks.head_loss(hidden, head).backward()
            found.append({name: one.grad for name, one in head.named_parameters()})
        self._compare(HEAD, *found)

    def chains(self, clients: Mapping[int, RemoteTraining]) -> None:
        """A step of LoRA in this process and through each chain, in turns; the first turn only warms up."""
        share = tasks.block_share(self.model)
        for number in range(-1, self.config.rounds):
            for servers in (LOCAL, *clients):
                before = clients[servers].chain.moved_bytes if servers else 0
                steps = self._through(LORA, clients[servers], 1) if servers else self._locally(LORA, 1)
                moved = clients[servers].chain.moved_bytes - before if servers else 0
                if number >= 0:
                    row = {"what": "chain", "servers": servers, "round": number, "block_share": share}
                    self.rows.append({**row, "seconds": steps[0].seconds, "bytes": moved})

    def curves(self) -> None:
        """Each task by stock PEFT, alone through the chain, and both through it at once; what was learned, reloaded."""
        steps = self.config.steps
        for kind, client in self.clients.items():
            self._keep(STOCK, kind, self._locally(kind, steps))
            self._keep(ALONE, kind, self._through(kind, client, steps))
            with torch.no_grad():
                loss = float(client.loss(self.ids[kind], self.ids[kind]))
            client.save(self._saved)
            with tasks.stock(self.model, self._saved / kind) as peft, torch.no_grad():
                difference = abs(float(tasks.stock_loss(peft, self.ids[kind])) - loss) / loss
            told = json.loads((self._saved / kind / RECIPE).read_text(encoding="utf-8"))
            row = {"what": "folder", "kind": kind, "same_base": told["base_sha256"] == self.sha256}
            self.rows.append({**row, "difference": difference})
        with ThreadPoolExecutor(len(self.clients)) as threads:
            both = {kind: threads.submit(self._through, kind, one, steps) for kind, one in self.clients.items()}
            for kind, found in both.items():
                self._keep(AT_ONCE, kind, found.result())

    def killed(self, ups: list[ServerProcess]) -> None:
        """LoRA once more; the chain's last server is killed between forward and backward of the middle step."""
        client, place = self.clients[LORA], self.config.steps // 2

        def strike(step: int) -> None:
            if step == place:
                swarm = client.chain.swarm
                wait_for(swarm.look())  # until the next look its choice among equals is this one
                _, record = wait_for(swarm.route(range(*map(int, ups[-1].blocks.split(":")))))[0]
                next(one for one in ups if one.address == record.address).kill()

        before = len(client.chain.faults)
        self._keep(KILLED, LORA, self._through(LORA, client, self.config.steps, strike))
        self.rows.append({"what": "fault", "step": place, "replaced": len(client.chain.faults) - before})

    def _start(self, kind: str, client: RemoteTraining) -> Trained:
        client.lora = client.prompt = None
        trained = tasks.start(kind, self.model.config, self.config.prompt_tokens, self.config.rank)
        setattr(client, kind, trained)
        return trained

    def _through(
        self, kind: str, client: RemoteTraining, steps: int, between: Callable[[int], None] = tasks.nothing
    ) -> list[TunedStep]:
        trained, ids = self._start(kind, client), self.ids[kind]
        return tasks.learn(lambda: client.loss(ids, ids), list(trained.parameters()), RATES[kind], steps, between)

    def _locally(self, kind: str, steps: int) -> list[TunedStep]:
        begun = tasks.start(kind, self.model.config, self.config.prompt_tokens, self.config.rank)
        begun.save(self._saved / kind, self.sha256)
        with tasks.stock(self.model, self._saved / kind) as peft:
            parameters = tasks.stock_parameters(peft)
            return tasks.learn(lambda: tasks.stock_loss(peft, self.ids[kind]), parameters, RATES[kind], steps)

    def _compare(self, kind: str, said: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        for name, one in local.items():
            difference = float((said[name] - one).abs().max() / one.abs().max())
            self.rows.append({"what": "gradient", "kind": kind, "name": name, "difference": difference})

    def _keep(self, run: str, kind: str, said: list[TunedStep]) -> None:
        row = {"what": "loss", "run": run, "kind": kind}
        self.rows += [{**row, "step": at, "loss": one.loss, "seconds": one.seconds} for at, one in enumerate(said)]


def tuning_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The largest differences: of gradients, of losses from one run of a task to another, each relative; rates of two
    clients beside those alone; seconds and bytes of a step by chain, and seconds beside the local step of the turn."""
    asked, whats = parameters["swarm_tuning"], ("gradient", "chain", "loss", "folder", "fault")
    of = {what: [row for row in rows if row["what"] == what] for what in whats}
    summary, every = Summary(), _largest([row["difference"] for row in of["gradient"]])
    summary.add("gradient_difference", every, than="one process", across="most")
    for kind in (PROMPT, LORA, HEAD):
        found = [row["difference"] for row in of["gradient"] if row["kind"] == kind]
        summary.add("gradient_difference", _largest(found), variant=kind, than="one process")
    runs = {(row["run"], row["kind"], row["step"]): row for row in of["loss"]}
    for run, other in HELD_TO.items():
        kept = [row for row in of["loss"] if row["run"] == run]
        pairs = [(row["loss"], runs[other, row["kind"], row["step"]]["loss"]) for row in kept]
        summary.add("loss_difference", _largest([abs(one - two) / two for one, two in pairs]), case=run, than=other)
    for kind in RATES:
        fell = runs[ALONE, kind, 0]["loss"] - runs[ALONE, kind, asked["steps"] - 1]["loss"]
        summary.add("fell_nats", {"value": fell, "unit": "nats"}, variant=kind, case=ALONE)
        for run in (STOCK, ALONE, AT_ONCE):
            rates = [1 / runs[run, kind, step]["seconds"] for step in range(asked["steps"])]
            summary.add("steps_per_s", bootstrap(rates, "median").summary("steps/s"), variant=kind, case=run)
    both, alone = ([entry["value"] for entry in summary.all("steps_per_s", case=run)] for run in (AT_ONCE, ALONE))
    share = {"value": sum(one / two for one, two in zip(both, alone, strict=True)), "unit": "x"}
    summary.add("steps_per_s_x", share, case=AT_ONCE, than=ALONE, across="sum")
    steps = {(row["servers"], row["round"]): row for row in of["chain"]}
    for servers in (LOCAL, *asked["chains"]):
        here = [steps[servers, number] for number in range(asked["rounds"])]
        over = [row["seconds"] / steps[LOCAL, row["round"]]["seconds"] for row in here]
        summary.add("step_s", bootstrap([row["seconds"] for row in here], "median").summary("s"), servers=servers)
        summary.add("step_x", bootstrap(over, "median").summary("x"), servers=servers, than="one process")
        summary.add("step_mb", {"value": here[0]["bytes"] / 1e6, "unit": "MB"}, servers=servers)
    (fault,) = of["fault"]
    summary.add("replaced", {"value": fault["replaced"], "unit": "servers"}, case=KILLED)
    summary.add("step_s", {"value": runs[KILLED, LORA, fault["step"]]["seconds"], "unit": "s"}, case=KILLED)
    good = [row["same_base"] and row["difference"] <= SAME for row in of["folder"]]
    summary.add("folders_pct", {"value": 100 * sum(good) / len(good), "unit": "%", "n": len(good)})
    summary.add("loss_difference", _largest([row["difference"] for row in of["folder"]]), case="folder", than=ALONE)
    return summary


def _largest(differences: list[float]) -> Entry:
    return {"value": max(differences), "unit": "of the largest", "n": len(differences)}
