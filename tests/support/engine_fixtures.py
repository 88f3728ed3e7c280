"""Tiny models whose answers hang on all of their context, what they say without an engine, and an auditor of blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import peft
import pytest
import torch
from beside_steps import BesideSteps
from chunked import Chunked
from hypothesis import HealthCheck, settings
from hypothesis import Phase as Stage
from plain_tokens import TOLERANCE, generated
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from firsttoken.assets.shapes import shape_config
from firsttoken.engine.accelerator import fuse
from firsttoken.engine.costs.cost_model import Costs
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.executor import Executor
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import PreemptionPolicy
from firsttoken.engine.request import Phase, Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.engine.simulated import SimulatedExecutor
from firsttoken.engine.trace import Trace

# for runs of a model by random schedules: a failing one is told as it was drawn, as to shrink it would take minutes
settings.register_profile(
    "live", deadline=None, phases=(Stage.explicit, Stage.generate), suppress_health_check=list(HealthCheck)
)

VOCABULARY = 256
ANSWER = 24  # tokens
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LENGTHS = (1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 20, 23, 24, 25, 28, 31, 32, 33, 36, 39, 40)


@dataclass(frozen=True)
class Known:
    """A prompt, and the greedy answer of ``ANSWER`` tokens that plain ``generate`` gives to it alone.

    None of these tokens is a near tie, so that tests may compare them exactly.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    def expected(self, sampling: Sampling) -> list[int]:
        """The answer as far as ``sampling`` lets it go: that of a greedy request does not hang on where it ends."""
        answer = self.answer[: sampling.max_tokens]
        ends = [i + 1 for i, token in enumerate(answer) if token in sampling.stop]
        return list(answer[: min(ends, default=len(answer))])


@dataclass(frozen=True)
class Subject:
    """A model and its known answers."""

    model: nn.Module
    known: tuple[Known, ...]


@dataclass
class Run:
    """One engine, the requests it was given and what it did, audited after every step."""

    engine: Engine
    trace: Trace
    host_free: int
    requests: list[Request] = field(default_factory=list)

    def submit(self, prompt: Sequence[int], sampling: Sampling, arrival_s: float | None = None) -> Request:
        self.requests.append(self.engine.submit(prompt, sampling, arrival_s))
        return self.requests[-1]

    def offer(self, *asked: tuple[int, int, float]) -> Run:
        """Submit prompts of (tokens, new tokens, arrival in s); the run itself."""
        for prompt, new, at_s in asked:
            self.submit([0] * prompt, Sampling(new), at_s)
        return self

    def step(self) -> list[tuple[Request, int]]:
        produced = self.engine.step()
        self.audit()
        return produced

    def finish(self) -> list[list[int]]:
        """Step to the end; all outputs, once every block is known to be back."""
        while self.engine.busy:
            self.step()
        self.all_back()
        return [request.output for request in self.requests]

    def until(self, holds: Callable[[], Any]) -> None:
        """Step until something holds; fails if it never does."""
        while not holds():
            assert self.engine.busy, "it ended before that"
            self.step()

    def audit(self) -> None:
        """Every block is free or belongs to those who begin alike up to its end (to one where prefixes are not shared),
        and a request has as many as it needs, in the queue of its phase."""
        engine, scheduler = self.engine, self.engine.scheduler
        engine.pool.check()
        size = engine.executor.block_tokens
        owned = Counter(block for request in self.requests for block in request.blocks)
        assert all(engine.pool.owners(block) == owned[block] for block in range(engine.pool.count)), "wrong owners"
        holds: dict[int, list[int]] = {}
        for request in self.requests:
            for place, block in enumerate(request.blocks):
                if owned[block] > 1:
                    assert engine.prefixes is not None, "two requests share a block"
                    assert (place + 1) * size <= request.cached, "a shared block will be written to"
                    begins = request.tokens[: (place + 1) * size]
                    assert holds.setdefault(block, begins) == begins, "two share a block, and do not begin alike"
        queues = {
            Phase.WAITING: scheduler.waiting,
            Phase.RUNNING: scheduler.running,
            Phase.RESTORING: scheduler.restoring,
            Phase.SWAPPED: scheduler.swapped,
        }
        for request in self.requests:
            homes = [phase for phase, queue in queues.items() if request in queue]
            coming = request.phase is Phase.WAITING and not homes
            assert homes == [request.phase] or request.finished or coming, "a request stands in the wrong queue"
            has_blocks = request.phase in (Phase.RUNNING, Phase.RESTORING)
            assert bool(request.blocks) == has_blocks
            if has_blocks:
                assert request.cached <= len(request.blocks) * engine.executor.block_tokens
            away = request.phase in (Phase.SWAPPED, Phase.RESTORING) and request.number not in scheduler.pending
            kept = engine.executor.write_through or request.head > 0  # a copy beside the blocks
            assert (request.host is not None) == away or (kept and not away)
        assert len(scheduler.running) + len(scheduler.restoring) <= engine.config.requests

    def all_back(self) -> None:
        """Nothing is held any more, in the pool or in the host's."""
        executor = self.engine.executor
        self.engine.pool.check()
        assert self.engine.pool.free == self.engine.pool.count
        assert all(request.finished and request.host is None for request in self.requests)
        if isinstance(executor, LiveExecutor) and executor.host_pool is not None:
            executor.host_pool.check()
        assert host_free(executor) == self.host_free


def host_free(executor: Executor) -> int:
    """Blocks of the host pool that nobody has."""
    if isinstance(executor, SimulatedExecutor):
        return executor._host_free
    host_pool = getattr(executor, "host_pool", None)  # a worker's is in its own process
    return host_pool.free if host_pool is not None else 0


@dataclass(frozen=True)
class Toy(Costs):
    """Seconds anyone can add up: 1 a step, 0.01 a prefill token, 0.1 a decode; 0.02 and 0.03 a token out and in."""

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        return 1 + 0.01 * sum(new for _, new in prefills) + 0.1 * len(contexts)

    def swap_out_s(self, tokens: int) -> float:
        return 0.02 * tokens

    def swap_in_s(self, tokens: int) -> float:
        return 0.03 * tokens


class Lab:
    """Makes engines, live and simulated, and at the end closes them."""

    @staticmethod
    def smallest_pool(sizes: Iterable[tuple[int, int]], block_tokens: int, watermark: float = 0.0) -> int:
        """The fewest blocks that each of some requests of (prompt, new) tokens could run in."""
        blocks = needed = max(-(-(prompt + new - 1) // block_tokens) for prompt, new in sizes)
        while blocks - int(watermark * blocks) < needed:
            blocks += 1
        return blocks

    def __init__(self) -> None:
        self._executors: list[Executor] = []

    def live(
        self,
        model: nn.Module,
        blocks: int,
        *,
        kind: type[LiveExecutor] = LiveExecutor,
        block_tokens: int = 4,
        host_blocks: int = 0,
        swap: str = "coalesced",
        write_through: bool = False,
        policy: PreemptionPolicy | None = None,
        **config: Any,
    ) -> Run:
        """An engine on ``model``; one at a time. ``config`` are fields of EngineConfig, by default no watermark."""
        self.close()
        copies = {"host_blocks": host_blocks, "swap": swap, "write_through": write_through}
        executor = kind(model, blocks, block_tokens=block_tokens, **copies)
        return self._run(executor, policy, config)

    def simulated(
        self, blocks: int, *, costs: Any = None, policy: PreemptionPolicy | None = None, **options: Any
    ) -> Run:
        """An engine on ``costs`` (Toy); ``options`` are those of SimulatedExecutor and fields of EngineConfig, and
        ``overlap`` lets swap-ins pass beside the steps."""
        kind = BesideSteps if options.pop("overlap", False) else SimulatedExecutor
        of_executor = ("block_tokens", "host_blocks", "context", "write_through")
        own = {name: options.pop(name) for name in of_executor if name in options}
        return self._run(kind(costs or Toy(), blocks, **({"block_tokens": 4} | own)), policy, options)

    def on(self, executor: Executor, *, policy: PreemptionPolicy | None = None, **config: Any) -> Run:
        """An engine on an executor that somebody else closes."""
        trace = Trace()
        engine = Engine(executor, EngineConfig(**({"watermark": 0.0} | config)), policy=policy, trace=trace)
        return Run(engine, trace, host_free(executor))

    def close(self) -> None:
        while self._executors:
            self._executors.pop().close()

    def _run(self, executor: Executor, policy: PreemptionPolicy | None, config: dict[str, Any]) -> Run:
        self._executors.append(executor)
        return self.on(executor, policy=policy, **config)


@pytest.fixture(scope="module")
def lab() -> Iterable[Lab]:
    lab = Lab()
    yield lab
    lab.close()


def build(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with weights large enough that its tokens vary: with the usual ones it repeats itself for ever."""
    config.update({"initializer_range": 0.3, "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    return model


def subject(model: nn.Module, seed: int, lengths: Sequence[int] = LENGTHS) -> Subject:
    """One known answer a length; prompts whose answer hangs on a near tie are passed over.

    A model that says the same whatever it has read would pass every test, so that is looked for here.
    """
    draw = torch.Generator().manual_seed(seed)
    known: list[Known] = []
    for length in lengths:
        while True:
            prompt = torch.randint(VOCABULARY, (length,), generator=draw).tolist()
            plain = generated(model, prompt, ANSWER)
            if plain.margin > TOLERANCE:  # the engine's logits differ from the plain ones by 1e-5
                break
        known.append(Known(tuple(prompt), tuple(plain.exact())))
    distinct = [len(set(one.answer)) for one in known]
    assert len({token for one in known for token in one.answer}) > 40 and sum(distinct) > 10 * len(known)
    for one in known[-4:]:
        other = [(one.prompt[0] + 1) % VOCABULARY, *one.prompt[1:]]
        assert generated(model, other, ANSWER).tokens != list(one.answer), (
            "the first token of a long prompt does not matter"
        )
    return Subject(model, tuple(known))


@pytest.fixture(scope="session")
def make_model() -> Callable[[PretrainedConfig], PreTrainedModel]:
    """``build``, for tests that need a shape of their own."""
    return build


@pytest.fixture(scope="session")
def make_subject() -> Callable[[PretrainedConfig], Subject]:
    """The same with a few known answers."""
    return lambda config: subject(build(config), seed=5, lengths=LENGTHS[::4])


@pytest.fixture(scope="session")
def llama() -> Subject:
    """Two layers, two query heads for each KV head, untied."""
    return subject(build(shape_config("tiny-2")), seed=1)


@pytest.fixture(scope="session")
def qwen2() -> Subject:
    """As ``llama``, with biases on queries, keys and values."""
    shape = {k: v for k, v in shape_config("tiny-2").to_dict().items() if k not in ("model_type", "head_dim")}
    model = build(Qwen2Config(**shape))
    assert model.model.layers[0].self_attn.k_proj.bias.any()
    return subject(model, seed=2, lengths=LENGTHS[::2])


@pytest.fixture(scope="session")
def gemma3() -> Subject:
    """Windows of 6 tokens beside layers that see all, with rotary angles of their own; norms of queries and keys and
    behind each half of a layer, a scale that is not the heads' width, and a soft limit of the logits."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "query_pre_attn_scalar": 4}
    kinds = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding")]
    config = Gemma3TextConfig(**(SMALL | {"num_hidden_layers": 4}), **heads, layer_types=kinds, sliding_window=6)
    config.final_logit_softcapping = 30.0
    model, draw = build(config), torch.Generator().manual_seed(6)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    return subject(model, seed=6, lengths=LENGTHS[::2])


@pytest.fixture(scope="session")
def fused() -> Subject:
    """Heads as wide as the kernels want them, layers fused: what runs on a CPU; the answers are the stock model's."""
    known = subject(build(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **SMALL)), seed=3)
    fuse(known.model)
    return known


@pytest.fixture(scope="module")
def in_pieces() -> Iterable[None]:
    """A scheduler more, under which every prompt goes in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULERS, Chunked.name, Chunked)
        yield


FAMILIES = {
    "many heads": LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **SMALL),
    "one KV head": LlamaConfig(num_attention_heads=4, num_key_value_heads=1, **SMALL),
    "wide heads": Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **SMALL),  # 64 of 32 hidden
    "no window": MistralConfig(num_attention_heads=4, num_key_value_heads=2, sliding_window=None, **SMALL),
    "scaled": GraniteConfig(num_attention_heads=4, num_key_value_heads=2, attention_multiplier=0.5, **SMALL),
    "experts": MixtralConfig(num_attention_heads=4, num_key_value_heads=2, num_local_experts=3, **SMALL),
    "half rotary": GlmConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **SMALL),
    "learned positions": GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=512, vocab_size=VOCABULARY),
}


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> Subject:
    """Other decoders of transformers, each with something that paging could get wrong."""
    return subject(build(FAMILIES[request.param]), seed=4, lengths=LENGTHS[-5:])


@pytest.fixture(scope="session")
def lora() -> Subject:
    """A PEFT adapter on every projection whose B is not 0: it changes every answer."""
    base = build(shape_config("tiny-2"))
    plain = subject(base, seed=3, lengths=LENGTHS[::4])
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")).eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    model.requires_grad_(False)
    adapted = subject(model, seed=3, lengths=LENGTHS[::2])
    assert all(generated(model, one.prompt, ANSWER).tokens != list(one.answer) for one in plain.known)
    return adapted
