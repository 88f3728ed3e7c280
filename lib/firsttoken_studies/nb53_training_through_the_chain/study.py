"""Training through servers: gradients beside local ones, two clients at once, a server killed, seconds and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import PretrainedConfig

from firsttoken.assets import corpora
from firsttoken.assets.adapter_files import RECIPE
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import Loaded
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check, text_of
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.petals.checkpoint_blocks import model_sha256
from firsttoken.petals.event_loop import wait_for
from firsttoken.petals.messages import MOST_TOKENS
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.tuning.client_adapters import Lora, SoftPrompt
from firsttoken.petals.tuning.remote_training import RemoteTraining, ThroughChain
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Entry, Summary
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.petals.cell_clients import CellTraining
from firsttoken_studies.petals.fleet import ServerProcess
from firsttoken_studies.petals.spans import running, split_evenly, stored
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

if TYPE_CHECKING:
    import pandas


# What clients learn where training is studied, through servers and by stock PEFT, from one start.

LORA, PROMPT, HEAD = "lora", "prompt", "head"
RATES = {LORA: 2e-3, PROMPT: 2e-2}
"""Adam's rates, of what is trained for several steps: LoRA on passages, a soft prompt on questions."""

_LORA = "base_model.model.model.layers.{}.{}.lora_{}.default.weight"
Trained = SoftPrompt | Lora


class TunedStep(NamedTuple):
    """The loss before a step of training, in nats a token, and the seconds of all of it."""

    loss: float
    seconds: float


def windows(loaded: Loaded, rows: int, tokens: int) -> dict[str, Tensor]:
    """``rows`` of ``tokens`` tokens of passages for LoRA, of questions for a prompt."""
    texts = {LORA: corpora.running_text("train"), PROMPT: [question for _, question in corpora.boolq_prompts("train")]}
    return {kind: corpora.token_windows(text, loaded.tokenizer, tokens, rows) for kind, text in texts.items()}


def start(kind: str, config: PretrainedConfig, prompt_tokens: int, rank: int) -> Trained:
    """Return the adapter or soft prompt that is trained, in its initial state: the same each time."""
    return SoftPrompt(config, prompt_tokens) if kind == PROMPT else Lora(config, rank, 2.0 * rank)


def nothing(_: int) -> None:
    """Do nothing between the passes of an undisturbed step."""


def learn(
    loss: Callable[[], Tensor],
    parameters: list[nn.Parameter],
    rate: float,
    steps: int,
    between: Callable[[int], None] = nothing,
) -> list[TunedStep]:
    """``steps`` of Adam; ``between`` is called with each one's number after its forward pass."""
    optimiser, steps_done = torch.optim.Adam(parameters, rate), []
    for step in range(steps):
        with Stopwatch() as watch:
            optimiser.zero_grad()
            loss_value = loss()
            between(step)
            loss_value.backward()
            optimiser.step()
        steps_done.append(TunedStep(float(loss_value.detach()), watch.seconds))
    return steps_done


@contextmanager
def stock(model: nn.Module, folder: Path) -> Iterator[PeftModel]:
    """Give ``model`` what PEFT reads from ``folder``, to be trained within the block; ``model`` is alone again
    afterwards."""
    with quiet_transformers():
        peft = PeftModel.from_pretrained(model, str(folder))
    for name, parameter in peft.named_parameters():  # PEFT's own switch is for all but prompts
        parameter.requires_grad_("lora_" in name or "prompt" in name)
    try:
        yield peft
    finally:
        if not peft.active_peft_config.is_prompt_learning:  # a prompt leaves the model alone
            peft.unload()


def stock_loss(peft: PeftModel, ids: Tensor) -> Tensor:
    """The mean over the next tokens of ``ids`` [rows, tokens]."""
    logits = peft(input_ids=ids).logits[:, -ids.shape[1] :]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def block_share(model: nn.Module) -> float:
    """Return the share of a forward pass's products that are the blocks': the rest is the head's."""
    blocks = sum(parameter.numel() for layer in layers_of(model) for parameter in layer.parameters())
    return blocks / (blocks + model.lm_head.weight.numel())


def head_loss(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return the loss of a head that tells from the last of ``hidden`` [rows, tokens, hidden] whether a row is of the
    second half."""
    labels = torch.arange(len(hidden)) >= len(hidden) // 2
    return F.cross_entropy(head(hidden[:, -1]), labels.long())


def gradients(trained: Trained) -> dict[str, Tensor]:
    """Return the gradients of ``trained`` by the names that ``stock_gradients`` uses."""
    if isinstance(trained, SoftPrompt):
        return {PROMPT: trained.weight.grad}
    return {
        _LORA.format(layer, name, half): gradient.grad
        for (layer, name), halves in trained.adapters().items()
        for half, gradient in zip("AB", halves, strict=True)
    }


def stock_gradients(peft: PeftModel) -> dict[str, Tensor]:
    """Return the gradient of each trained tensor by its name within PEFT's model; a prompt's by PROMPT."""
    gradients = {name: parameter.grad for name, parameter in peft.named_parameters() if parameter.requires_grad}
    return {PROMPT: next(iter(gradients.values()))} if len(gradients) == 1 else gradients


SAME = 1e-4  # of the largest value: what float32 may differ by
STOCK, ALONE, AT_ONCE, KILLED = "stock", "alone", "at_once", "killed"
HELD_TO = {ALONE: STOCK, AT_ONCE: ALONE, KILLED: ALONE}  # whose losses a run should have
LOCAL = 0  # servers: stock PEFT in the client's process
_TIMEOUTS = Timeouts(step_s=60.0, refresh_s=600.0, ban_s=600.0, find_s=60.0)


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
            raise ProfileError(f"swarm_tuning.tokens and prompt_tokens must be at most {MOST_TOKENS} together")

    def needs(self) -> list[Need]:
        """Require a model with a block for each server, and the context, and a text that holds the rows."""
        return [
            Need("swarm_tuning.chains", max(self.chains), LAYERS),
            Need("swarm_tuning.tokens", self.tokens + self.prompt_tokens, CONTEXT),
            Need("swarm_tuning.rows x tokens", self.rows * self.tokens, text_of("train")),
        ]


def swarm_tuning(profile: Profile, *, through: Any = ThroughChain) -> Outcome:
    """Rows {what: gradient, kind, name, difference}, relative to the largest of the tensor; {what: chain, servers,
    round, block_share, seconds, bytes} of a step of LoRA; {what: loss, run, kind, step, loss, seconds}; {what: folder,
    kind, same_base, difference} of the loss that stock PEFT has with it. All in float32.

    ``through`` brings hidden states forward and gradients back: the library's, or a function as ``CellTraining`` takes.
    """
    config = profile.section("swarm_tuning", SwarmTuningConfig)
    check(config.needs(), ModelFacts(profile.model))
    torch.set_num_threads(config.threads or torch.get_num_threads())
    with stored(profile) as (folder, loaded), ExitStack() as stack:
        depth, clients, ups = len(layers_of(loaded.model)), {}, []

        def client() -> RemoteTraining:
            kind = RemoteTraining if through is ThroughChain else CellTraining
            made = stack.enter_context(kind(folder, [ups[0].address], timeouts=_TIMEOUTS))
            made.function = through
            return made

        for servers in sorted(config.chains):
            spans = split_evenly(depth, servers)
            spare = spans[-1:] if servers == max(config.chains) else []
            ups = stack.enter_context(running(folder, [*spans, *spare], True, config.threads))
            clients[servers] = client()
        study = _TuningStudy(folder, loaded, config, [clients[max(config.chains)], client()])
        study.gradients()
        study.chains(clients)
        study.curves()
        study.killed(ups)
    return Outcome(study.rows, provenance=loaded.provenance.as_dict())


class _TuningStudy:
    """The study's training runs: through ``clients`` of one chain, a kind each, and by stock PEFT."""

    def __init__(self, folder: Path, loaded: Loaded, config: SwarmTuningConfig, clients: list[RemoteTraining]) -> None:
        self.model, self.config, self.rows = loaded.model, config, []
        self.ids = windows(loaded, config.rows, config.tokens)
        self.clients = dict(zip(RATES, clients, strict=True))
        self.sha256, self._saved = model_sha256(folder), folder / "trained"

    def gradients(self) -> None:
        """Compare once the gradients of all that a client may train with local ones."""
        for kind, client in self.clients.items():
            trained = self._start(kind, client)
            if isinstance(trained, Lora):  # at the start second halves are zero, and so are the first ones' gradients
                draw = torch.Generator().manual_seed(1)
                with torch.no_grad():
                    for half in trained.b.values():
                        half.copy_(0.02 * torch.randn(half.shape, generator=draw))
            client.loss(self.ids[kind], self.ids[kind]).backward()
            client.save(self._saved)
            with stock(self.model, self._saved / kind) as peft:
                stock_loss(peft, self.ids[kind]).backward()
                self._compare(kind, gradients(trained), stock_gradients(peft))
        ids, client = torch.cat([self.ids[LORA], self.ids[PROMPT]]), self.clients[LORA]
        client.lora, measured = None, []
        with torch.no_grad():
            both = client.hidden(ids), self.model.model(input_ids=ids).last_hidden_state
        for hidden in both:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                head = nn.Linear(hidden.shape[-1], 2)
            head_loss(hidden, head).backward()
            measured.append({name: parameter.grad for name, parameter in head.named_parameters()})
        self._compare(HEAD, *measured)

    def chains(self, clients: Mapping[int, RemoteTraining]) -> None:
        """A step of LoRA in this process and through each chain, in turns; the first turn only warms up."""
        share = block_share(self.model)
        for number in range(-1, self.config.rounds):
            for servers in (LOCAL, *clients):
                before = clients[servers].chain.moved_bytes if servers else 0
                steps = self._through(LORA, clients[servers], 1) if servers else self._locally(LORA, 1)
                moved = clients[servers].chain.moved_bytes - before if servers else 0
                if number >= 0:
                    row = {"what": "chain", "servers": servers, "round": number, "block_share": share}
                    self.rows.append({**row, "seconds": steps[0].seconds, "bytes": moved})

    def curves(self) -> None:
        """Train each task by stock PEFT, alone through the chain, and both through it at once; reload the results."""
        steps = self.config.steps
        for kind, client in self.clients.items():
            self._keep(STOCK, kind, self._locally(kind, steps))
            self._keep(ALONE, kind, self._through(kind, client, steps))
            with torch.no_grad():
                loss = float(client.loss(self.ids[kind], self.ids[kind]))
            client.save(self._saved)
            with stock(self.model, self._saved / kind) as peft, torch.no_grad():
                difference = abs(float(stock_loss(peft, self.ids[kind])) - loss) / loss
            recipe = json.loads((self._saved / kind / RECIPE).read_text(encoding="utf-8"))
            row = {"what": "folder", "kind": kind, "same_base": recipe["base_sha256"] == self.sha256}
            self.rows.append({**row, "difference": difference})
        with ThreadPoolExecutor(len(self.clients)) as threads:
            both = {
                kind: threads.submit(self._through, kind, tuned_client, steps)
                for kind, tuned_client in self.clients.items()
            }
            for kind, tuned in both.items():
                self._keep(AT_ONCE, kind, tuned.result())

    def killed(self, ups: list[ServerProcess]) -> None:
        """LoRA once more; the chain's last server is killed between forward and backward of the middle step."""
        client, fault_step = self.clients[LORA], self.config.steps // 2

        def strike(step: int) -> None:
            if step == fault_step:
                swarm = client.chain.swarm
                wait_for(swarm.refresh())  # until the next look its choice among equals is this one
                _, record = wait_for(swarm.route(range(*map(int, ups[-1].blocks.split(":")))))[0]
                next(member for member in ups if member.address == record.address).kill()

        before = len(client.chain.faults)
        self._keep(KILLED, LORA, self._through(LORA, client, self.config.steps, strike))
        self.rows.append({"what": "fault", "step": fault_step, "replaced": len(client.chain.faults) - before})

    def _start(self, kind: str, client: RemoteTraining) -> Trained:
        client.lora = client.prompt = None
        trained = start(kind, self.model.config, self.config.prompt_tokens, self.config.rank)
        setattr(client, kind, trained)
        return trained

    def _through(
        self, kind: str, client: RemoteTraining, steps: int, between: Callable[[int], None] = nothing
    ) -> list[TunedStep]:
        trained, ids = self._start(kind, client), self.ids[kind]
        return learn(lambda: client.loss(ids, ids), list(trained.parameters()), RATES[kind], steps, between)

    def _locally(self, kind: str, steps: int) -> list[TunedStep]:
        begun = start(kind, self.model.config, self.config.prompt_tokens, self.config.rank)
        begun.save(self._saved / kind, self.sha256)
        with stock(self.model, self._saved / kind) as peft:
            parameters = [parameter for parameter in peft.parameters() if parameter.requires_grad]
            return learn(lambda: stock_loss(peft, self.ids[kind]), parameters, RATES[kind], steps)

    def _compare(self, kind: str, remote: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> None:
        for name, local_gradient in local.items():
            difference = float((remote[name] - local_gradient).abs().max() / local_gradient.abs().max())
            self.rows.append({"what": "gradient", "kind": kind, "name": name, "difference": difference})

    def _keep(self, run: str, kind: str, tuned_steps: list[TunedStep]) -> None:
        row = {"what": "loss", "run": run, "kind": kind}
        self.rows += [
            {**row, "step": number, "loss": tuned_step.loss, "seconds": tuned_step.seconds}
            for number, tuned_step in enumerate(tuned_steps)
        ]


def tuning_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """The largest differences: of gradients, of losses from one run of a task to another, each relative; rates of two
    clients beside those alone; seconds and bytes of a step by chain, and seconds beside the local step of the turn."""
    summary, gradient, folder = Summary(), frame_of(rows, what="gradient"), frame_of(rows, what="folder")
    summary.add("gradient_difference", _largest(gradient.difference), than="one process", across="most")
    for kind in (PROMPT, LORA, HEAD):
        differences = gradient[gradient.kind == kind].difference
        summary.add("gradient_difference", _largest(differences), variant=kind, than="one process")
    steps = frame_of(rows, what="loss").set_index(["run", "kind", "step"]).sort_index()
    for run, other in HELD_TO.items():
        apart = (steps.loss[run] / steps.loss[other] - 1).abs().dropna()
        summary.add("loss_difference", _largest(apart), case=run, than=other)
    for kind in RATES:
        losses = steps.loss[ALONE, kind]
        summary.add("fell_nats", {"value": losses.iloc[0] - losses.iloc[-1], "unit": "nats"}, variant=kind, case=ALONE)
        for run in (STOCK, ALONE, AT_ONCE):
            rate = bootstrap(1 / steps.seconds[run, kind], "median").summary("steps/s")
            summary.add("steps_per_s", rate, variant=kind, case=run)
    both, alone = ([entry["value"] for entry in summary.all("steps_per_s", case=run)] for run in (AT_ONCE, ALONE))
    share = {"value": sum(first / two for first, two in zip(both, alone, strict=True)), "unit": "x"}
    summary.add("steps_per_s_x", share, case=AT_ONCE, than=ALONE, across="sum")
    chain = frame_of(rows, what="chain")
    chain["over"] = chain.seconds / chain["round"].map(chain[chain.servers == LOCAL].set_index("round").seconds)
    for servers, chain_rows in chain.groupby("servers", sort=False):
        summary.by(chain_rows, {"servers": "servers"}, {"step_s": ("seconds", "median", "s")})
        summary.by(chain_rows, {"servers": "servers"}, {"step_x": ("over", "median", "x")}, than="one process")
        summary.add("step_mb", {"value": chain_rows.bytes.iloc[0] / 1e6, "unit": "MB"}, servers=servers)
    (fault,) = rows_where(rows, what="fault")
    summary.add("replaced", {"value": fault["replaced"], "unit": "servers"}, case=KILLED)
    summary.add("step_s", {"value": steps.seconds[KILLED, LORA, fault["step"]], "unit": "s"}, case=KILLED)
    good = folder.same_base & (folder.difference <= SAME)
    summary.add("folders_pct", bootstrap(good).summary("%", 100))
    summary.add("loss_difference", _largest(folder.difference), case="folder", than=ALONE)
    return summary


def _largest(differences: pandas.Series) -> Entry:
    return {"value": differences.max(), "unit": "of the largest", "n": len(differences)}
