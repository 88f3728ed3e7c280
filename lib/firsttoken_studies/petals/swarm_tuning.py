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
from firsttoken.petals.timeouts import Patience
from firsttoken.petals.tuning.client_adapters import Lora, SoftPrompt
from firsttoken.petals.tuning.frozen import MOST_KEPT
from firsttoken.petals.tuning.remote_training import RemoteTraining
from firsttoken.petals.wire import MOST_TOKENS
from firsttoken.study.errors import ProfileError
from firsttoken.study.overlay import PALE, Drawn, name_results, over
from firsttoken.study.plot import COLOURS, LOOKS
from firsttoken.study.profile import Profile
from firsttoken.study.record import Outcome, Result, Rows
from firsttoken.study.show import interval
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Entry, Summary
from firsttoken.study.timing import Stopwatch
from firsttoken_studies.petals.fleet import ServerProcess
from firsttoken_studies.petals.spans import running, split_evenly, stored

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    texts = {LORA: corpora.running_text("train"), PROMPT: [asked for _, asked in corpora.boolq_prompts("train")]}
    return {kind: corpora.token_windows(text, loaded.tokenizer, tokens, rows) for kind, text in texts.items()}


def start(kind: str, config: PretrainedConfig, prompt_tokens: int, rank: int) -> Trained:
    """What is trained, as it begins: the same each time."""
    return SoftPrompt(config, prompt_tokens) if kind == PROMPT else Lora(config, rank, 2.0 * rank)


def nothing(_: int) -> None:
    """What is done between the passes of an undisturbed step."""


def learn(
    loss: Callable[[], Tensor],
    parameters: list[nn.Parameter],
    rate: float,
    steps: int,
    between: Callable[[int], None] = nothing,
) -> list[TunedStep]:
    """``steps`` of Adam; ``between`` is called with each one's number after its forward pass."""
    optimiser, said = torch.optim.Adam(parameters, rate), []
    for step in range(steps):
        with Stopwatch() as watch:
            optimiser.zero_grad()
            found = loss()
            between(step)
            found.backward()
            optimiser.step()
        said.append(TunedStep(float(found.detach()), watch.seconds))
    return said


@contextmanager
def stock(model: nn.Module, folder: Path) -> Iterator[PeftModel]:
    """``model`` with what PEFT reads from ``folder``, to be trained; ``model`` alone again afterwards."""
    with quiet_transformers():
        peft = PeftModel.from_pretrained(model, str(folder))
    for name, one in peft.named_parameters():  # PEFT's own switch is for all but prompts
        one.requires_grad_("lora_" in name or "prompt" in name)
    try:
        yield peft
    finally:
        if not peft.active_peft_config.is_prompt_learning:  # a prompt leaves the model alone
            peft.unload()


def stock_loss(peft: PeftModel, ids: Tensor) -> Tensor:
    """The mean over the next tokens of ``ids`` [rows, tokens]."""
    logits = peft(input_ids=ids).logits[:, -ids.shape[1] :]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def stock_parameters(peft: PeftModel) -> list[nn.Parameter]:
    """What is trained."""
    return [one for one in peft.parameters() if one.requires_grad]


def block_share(model: nn.Module) -> float:
    """Return the share of a forward pass's products that are the blocks': the rest is the head's."""
    blocks = sum(one.numel() for layer in layers_of(model) for one in layer.parameters())
    return blocks / (blocks + model.lm_head.weight.numel())


def head_loss(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Return the loss of a head that tells whether a row is of the second half.

    It reads the last of ``hidden`` [rows, tokens, hidden].
    """
    labels = torch.arange(len(hidden)) >= len(hidden) // 2
    return F.cross_entropy(head(hidden[:, -1]), labels.long())


def gradients(trained: Trained) -> dict[str, Tensor]:
    """Return the gradients of ``trained`` by the names that ``stock_gradients`` uses."""
    if isinstance(trained, SoftPrompt):
        return {PROMPT: trained.weight.grad}
    return {
        _LORA.format(layer, name, half): one.grad
        for (layer, name), halves in trained.adapters().items()
        for half, one in zip("AB", halves, strict=True)
    }


def stock_gradients(peft: PeftModel) -> dict[str, Tensor]:
    """Return the gradient of each trained tensor by its name within PEFT's model; a prompt's by PROMPT."""
    found = {name: one.grad for name, one in peft.named_parameters() if one.requires_grad}
    return {PROMPT: next(iter(found.values()))} if len(found) == 1 else found


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
        client.lora, found = None, []
        with torch.no_grad():
            both = client.hidden(ids), self.model.model(input_ids=ids).last_hidden_state
        for hidden in both:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                head = nn.Linear(hidden.shape[-1], 2)
            head_loss(hidden, head).backward()
            found.append({name: one.grad for name, one in head.named_parameters()})
        self._compare(HEAD, *found)

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
        """Each task by stock PEFT, alone through the chain, and both through it at once; what was learned, reloaded."""
        steps = self.config.steps
        for kind, client in self.clients.items():
            self._keep(STOCK, kind, self._locally(kind, steps))
            self._keep(ALONE, kind, self._through(kind, client, steps))
            with torch.no_grad():
                loss = float(client.loss(self.ids[kind], self.ids[kind]))
            client.save(self._saved)
            with stock(self.model, self._saved / kind) as peft, torch.no_grad():
                difference = abs(float(stock_loss(peft, self.ids[kind])) - loss) / loss
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
            parameters = stock_parameters(peft)
            return learn(lambda: stock_loss(peft, self.ids[kind]), parameters, RATES[kind], steps)

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


# The figures and tables of notebook 53, drawn from results alone.

KIND_NAMES = {LORA: "LoRA, on passages", PROMPT: "a soft prompt, on questions", HEAD: "a head of the client's own"}
RUN_NAMES = {
    STOCK: "stock PEFT, one process",
    ALONE: "through servers, alone",
    AT_ONCE: "through servers, both at once",
    KILLED: "through servers, one killed",
}
_LOOKS = {STOCK: "other", ALONE: "measured", AT_ONCE: "single", KILLED: "mark"}


def curves(recorded: Result | None, now: Result) -> Figure:
    """The loss of each task by step, in each run; where a server was killed."""
    import matplotlib.pyplot as plt

    results = over(recorded, now)
    fig, axes = plt.subplots(len(results), 2, figsize=(9, 1 + 2.6 * len(results)), squeeze=False)
    styles = {
        STOCK: {"linewidth": 7, "marker": ""},
        ALONE: {"linewidth": 2, "marker": ""},
        AT_ONCE: {"linestyle": "", "marker": "o", "markersize": 9, "markerfacecolor": "none", "markeredgewidth": 2},
        KILLED: {"linestyle": "", "marker": "x", "markersize": 6, "markeredgewidth": 1.5},
    }
    for drawn, row_of_axes in zip(results, axes, strict=True):
        for ax, kind in zip(row_of_axes, (LORA, PROMPT), strict=True):
            for run, style in styles.items():
                losses = {row["step"] + 1: row["loss"] for row in _losses(drawn.result, run, kind)}
                label = RUN_NAMES[run] if drawn.own and kind == LORA else None
                ax.plot([*losses], [*losses.values()], color=COLOURS[_LOOKS[run]], label=label, **style)
            ax.set_title(f"{KIND_NAMES[kind]}\n{drawn.who()}", fontsize=10)
            ax.set(xlabel="step", ylabel="loss, nats a token")
            ax.xaxis.get_major_locator().set_params(integer=True)
        place = next(row["step"] for row in drawn.result.rows if row["what"] == "fault") + 1
        row_of_axes[0].axvline(place, color=COLOURS["mark"], linewidth=0.8, linestyle=(0, (1, 3)))
        at = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        row_of_axes[0].annotate("a server is killed", (place, 1), (4, -4), fontsize=9, va="top", **at)
    fig.suptitle("Nobody is disturbed: losses through servers are those of one process")
    fig.legend(loc="outside lower center", ncols=4, fontsize=9)
    return fig


def _losses(result: Result, run: str, kind: str) -> Rows:
    return [row for row in result.rows if row["what"] == "loss" and (row["run"], row["kind"]) == (run, kind)]


def step_times(recorded: Result | None, now: Result) -> Figure:
    """Seconds of a step of LoRA by chain beside what its arithmetic takes, each over the local step of its run."""
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(9, 3.8))
    results = over(recorded, now)
    chains = sorted({servers for drawn in results for servers in _chains(drawn.result)})
    for drawn in results:
        for place, servers in enumerate(chains):
            entry = drawn.result.summary.get("step_x", servers=servers, than="one process")
            drawn.point(ax, place + drawn.shift, entry, "measured", along="x")
            if servers and entry is not None:
                passes = 2 * [_forwards_again(drawn, servers)]
                ends = [place + drawn.shift - 0.13, place + drawn.shift + 0.13]
                ax.plot(passes, ends, color=COLOURS["floor"], linewidth=3, alpha=1 if drawn.own else PALE)
    handles = [
        plt.Line2D([], [], color=COLOURS["measured"], marker=LOOKS["measured"].marker, label="median, its interval"),
        plt.Line2D([], [], color=COLOURS["floor"], linewidth=3, label="the local step, blocks forward twice or thrice"),
    ]
    ax.set_yticks(range(len(chains)), [_name(servers) for servers in chains])
    ax.set(ylim=(len(chains) - 0.5, -0.5), xlim=(0, None), xlabel="a step of LoRA, over that of one process")
    ax.legend(handles=handles, loc="lower left", fontsize=9)
    fig.suptitle("Servers forget, so backward runs blocks forward again: one long span even thrice")
    name_results(fig, results, "step_x")
    return fig


def _forwards_again(drawn: Drawn, servers: int) -> float:
    """The local step with the forward passes added that servers compute again, over the local step.

    A step through frozen blocks is as much forward as backward. Each layer runs forward once more for backward, and
    those of all stretches that a server goes back in, but the last, once more for their outputs.
    """
    rows, asked = drawn.result.rows, drawn.result.parameters["swarm_tuning"]
    share = next(row["block_share"] for row in rows if row["what"] == "chain")
    names = [row["name"] for row in rows if row["what"] == "gradient" and row["kind"] == LORA]
    depth = len({name.split("layers.")[-1].split(".")[0] for name in names})
    several = max(1, MOST_KEPT // (asked["rows"] * asked["tokens"]))
    spans = [span.split(":") for span in split_evenly(depth, servers)]
    again = sum((int(b) - int(a) - 1) // several * several for a, b in spans)
    return 1 + share / 2 * (1 + again / depth)


def gradient_rows(recorded: Result | None, now: Result) -> Rows:
    """The largest difference from local gradients, by what is trained."""
    return [
        {
            "what is trained": name,
            "gradients": (found := _gradient(drawn.result, kind))["n"],
            "largest difference": f"{found['value']:.1e}",
            "whose": drawn.who(),
        }
        for drawn in over(recorded, now)
        for kind, name in KIND_NAMES.items()
    ]


def _gradient(result: Result, kind: str) -> Entry:
    return result.summary.of("gradient_difference", variant=kind, than="one process")


def chain_rows(recorded: Result | None, now: Result) -> Rows:
    """Seconds and megabytes of a step of LoRA, by chain."""
    return [
        {
            "blocks": _name(servers),
            "a step, s": interval(drawn.result.summary.of("step_s", servers=servers), 2),
            "over one process": interval(drawn.result.summary.of("step_x", servers=servers, than="one process"), 2),
            "by its forward passes": f"{_forwards_again(drawn, servers):.2f}" if servers else "",
            "over the wire, MB a step": f"{drawn.result.summary.value('step_mb', servers=servers):.2f}",
            "whose": drawn.who(),
        }
        for drawn in over(recorded, now)
        for servers in _chains(drawn.result)
    ]


def run_rows(recorded: Result | None, now: Result) -> Rows:
    """Steps a second of each task in each run, and the largest difference of a loss from the run it is held to."""
    rows: Rows = []
    for drawn in over(recorded, now):
        summary = drawn.result.summary
        for run, name in RUN_NAMES.items():
            rates = {
                f"{KIND_NAMES[kind]}, steps/s": interval(summary.get("steps_per_s", variant=kind, case=run), 2)
                for kind in (LORA, PROMPT)
            }
            apart = summary.get("loss_difference", case=run, than=HELD_TO.get(run, ""))
            told = f"{apart['value']:.1e}" if apart else ""
            rows.append({"run": name, **rates, "largest difference of a loss": told, "whose": drawn.who()})
    return rows


def _chains(result: Result) -> list[int]:
    return [LOCAL, *result.parameters["swarm_tuning"]["chains"]]


def _name(servers: int) -> str:
    return f"on {servers} server{'s'[: servers > 1]}" if servers else "in one process"
