"""A stored prefix inside the engine: it says what partial prefill says, beside others, and when its link dies too."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dying_link import DyingLink
from plain_tokens import Plain, check_greedy, judged

from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.source import StoredPrefix
from firsttoken.droidspeak.store import KVStore
from firsttoken.engine.engine import Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.schedulers import SCHEDULERS
from firsttoken.link.shaped import Link, LinkConfig
from firsttoken.study.errors import CacheError, RequestError

DEPTH, EDGES = 6, (2, 3)
GROUPS = [Group(0, 0), Group(0, 2), Group(2, 4), Group(3, DEPTH), Group(0, DEPTH)]
CONTEXT = [(7 * place) % 250 + 1 for place in range(48)]
SUFFIX = [5, 6, 7]


class Pair:
    """A receiver, and a store that holds what a sender has computed for ``CONTEXT``."""

    def __init__(self, tiny, folder: Path | None) -> None:
        self.plain, sender = tiny(1, layers=DEPTH), tiny(2, layers=DEPTH)
        self.model = copy.deepcopy(self.plain)
        self.sender, self.receiver = (identify(model, None, str(n)) for n, model in enumerate((sender, self.plain)))
        self.sent = full_prefill(sender, Prefix.of([CONTEXT]), EDGES)
        self.store = KVStore(folder, memory_bytes=1 << 24, disk_bytes=1 << 24 if folder else 0)
        self.store.store(CONTEXT, self.sender, self.sent)

    def source(self, group: Group, link: Link | None = None, prompt: Sequence[int] = (), **changes) -> StoredPrefix:
        known = {"sender": self.sender, "receiver": self.receiver} | changes
        return StoredPrefix(self.store, prompt or [*CONTEXT, *SUFFIX], group=group, link=link, **known)

    @torch.inference_mode()
    def said(self, group: Group, tokens: int, said: Sequence[int]) -> Plain:
        """``said`` with the logits of a partial prefill of the first ``tokens`` tokens and all that was said
        before."""
        prefix = Prefix.of([CONTEXT[:tokens]])
        kv = tuple(type(one)(*(part[..., :tokens, :] for part in one)) for one in self.sent.kv)
        sent = replace(self.sent, kv=kv, e_cache={n: edge[:, :tokens] for n, edge in self.sent.e_cache.items()})
        cache = partial_prefill(self.plain, prefix, sent, group)
        rest = torch.tensor([[*CONTEXT[tokens:], *SUFFIX, *said[:-1]]])
        return Plain(list(said), suffix_logits(self.plain, prefix, rest, cache, keep=len(said))[0].float())


@pytest.fixture(params=["memory", "disk"])
def pair(request, tiny, tmp_path) -> Pair:
    return Pair(tiny, tmp_path / "store" if request.param == "disk" else None)


@pytest.fixture
def on_disk(tiny, tmp_path) -> Pair:
    return Pair(tiny, tmp_path / "store")


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Makes an engine; at the end nothing of it is held."""
    made: list[Engine] = []

    def make(pair: Pair, blocks: int = 200, host_blocks: int = 0, **config) -> Engine:
        executor = LiveExecutor(pair.model, blocks, block_tokens=4, host_blocks=host_blocks)
        options = {"watermark": 0.0, "requests": 16, "token_budget": 16} | config
        made.append(Engine(executor, EngineConfig(**options)))
        return made[-1]

    yield make
    for one in made:
        with closing(one.executor):
            one.pool.check()
            assert one.pool.free == one.pool.count and not one.busy


def submit(engine: Engine, source: StoredPrefix | None, count: int = 8, prompt: Sequence[int] = ()) -> Request:
    return engine.submit(prompt or [*CONTEXT, *SUFFIX], Sampling(count), source=source)


@pytest.mark.parametrize("scheduler", ["sarathi", "prefill_first", "request_level", "hybrid_only"])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_the_engine_says_what_partial_prefill_says(pair, engine, group: Group, scheduler: str) -> None:
    at = engine(pair, scheduler=scheduler)
    request = submit(at, pair.source(group))
    at.run()
    told = pair.said(group, len(CONTEXT), request.output)
    assert check_greedy(request.output, told) == 8
    assert at.token_counts["prefill"] == len(SUFFIX) and at.token_counts["recompute"] == (
        len(CONTEXT) if len(group) else 0
    )


def test_a_prefix_that_the_context_leaves_half_way(pair, engine) -> None:
    at, group = engine(pair), Group(2, 4)
    prompt = [*CONTEXT[:32], 250, 251, 252]
    source = pair.source(group, prompt=prompt)
    assert source.tokens == 32
    request = submit(at, source, prompt=prompt)
    at.run()
    with torch.inference_mode():
        assert request.output != judged(pair.plain, prompt, request.output).logits.argmax(-1).tolist()


@pytest.mark.parametrize("rate", [0.0, 0.0005], ids=["unshaped", "0.5 Mbit/s"])
def test_over_a_link_beside_others(on_disk, engine, rate: float) -> None:
    """Those that run go on while it is under way; they say what they say alone."""
    at, group = engine(on_disk, scheduler="sarathi"), Group(2, 4)
    others = [at.submit([number + 1] * 9, Sampling(40)) for number in range(4)]
    at.step()
    request = submit(at, on_disk.source(group, Link(LinkConfig(rate))))
    went_on = 0
    while at.busy:
        at.step()
        went_on += request.phase == "restoring" and bool(at.scheduler.running)
    assert rate == 0.0 or went_on >= 2
    assert check_greedy(request.output, on_disk.said(group, len(CONTEXT), request.output)) == 8
    for other in others:
        assert check_greedy(other.output, judged(on_disk.plain, other.tokens[:9], other.output)) == 40


@pytest.mark.parametrize("when", ["at once", "behind the edge", "near the end"])
def test_a_link_that_dies_costs_time_only(on_disk, engine, when: str) -> None:
    """Everything is then computed from the tokens."""
    edge, layer = on_disk.sent.e_cache[2].nbytes, sum(part.nbytes for part in on_disk.sent.kv[0])
    dies = {"at once": 0, "behind the edge": edge + layer, "near the end": edge + 4 * layer - 1}[when]
    at = engine(on_disk, scheduler="sarathi")
    other = at.submit([9] * 9, Sampling(20))
    request = submit(at, on_disk.source(Group(2, 4), DyingLink(dies)))
    at.run()
    prompt = [*CONTEXT, *SUFFIX]
    assert check_greedy(request.output, judged(on_disk.plain, prompt, request.output)) == 8
    assert check_greedy(other.output, judged(on_disk.plain, [9] * 9, other.output)) == 20
    assert "the link died" in request.fell_back


@pytest.mark.parametrize("piece", ["edge.2", "layer.0", "layer.5", None])
def test_a_file_that_is_torn_or_gone_is_noticed(on_disk, engine, piece: str | None) -> None:
    at = engine(on_disk)
    located, _ = on_disk.store.locate(CONTEXT, on_disk.sender, 2)
    source = on_disk.source(Group(2, 4), Link())
    if piece is None:
        located.path.unlink()
    else:
        content = bytearray(located.path.read_bytes())
        content[located.spans[piece].offset + 5] ^= 1
        located.path.write_bytes(content)
    request = submit(at, source)
    at.run()
    assert check_greedy(request.output, judged(on_disk.plain, [*CONTEXT, *SUFFIX], request.output)) == 8
    assert ("its sha256 is not that of what was stored" if piece else "No such file") in request.fell_back


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda edge: edge[:, :10], r"hidden states \[1, 10, 32\]"),
        (lambda edge: edge[..., :16], r"hidden states \[1, 48, 16\]"),
        (lambda edge: edge.bfloat16(), "of torch.bfloat16 do not fit"),
    ],
)
def test_an_edge_that_does_not_fit_hurts_nobody_else(pair, engine, monkeypatch, spoil: Callable, why: str) -> None:
    edge = StoredPrefix.hidden_states
    monkeypatch.setattr(StoredPrefix, "hidden_states", lambda source: spoil(edge(source)))
    at = engine(pair, scheduler="sarathi")
    other, request = at.submit([9] * 9, Sampling(20)), submit(at, pair.source(Group(2, 4)))
    at.run()
    assert re.search(why, request.fell_back), request.fell_back
    assert check_greedy(request.output, judged(pair.plain, [*CONTEXT, *SUFFIX], request.output)) == 8
    assert check_greedy(other.output, judged(pair.plain, [9] * 9, other.output)) == 20


def test_cancelled_in_every_phase(on_disk, engine) -> None:
    """Before it is admitted, while the edge, the group and the layers are under way, in its suffix and its answer."""
    group, seen = Group(2, 4), set()
    for steps in range(0, 40, 2):
        at = engine(on_disk, scheduler="sarathi", token_budget=16)
        other = at.submit([3] * 5, Sampling(60))
        request = submit(at, on_disk.source(group, Link(LinkConfig(0.02))))
        for _ in range(steps):
            at.step()
        seen.add((str(request.phase), request.redo is not None, bool(request.output)))
        at.cancel(request)
        assert not at.scheduler.pending and not request.blocks
        at.run()
        assert len(other.output) == 60
        at.executor.close()
    assert len(seen) >= 3, seen


def test_random_schedules(on_disk, engine) -> None:
    """With preemption, swaps and shared prefixes: who was preempted in its prefix says what it computes itself."""
    own = 0
    for seed in range(60):
        rng = random.Random(seed)
        at = engine(
            on_disk,
            blocks=rng.randint(18, 60),
            host_blocks=rng.choice((0, 40)),
            scheduler=rng.choice(sorted(SCHEDULERS)),
            preemption=rng.choice(("swap", "recompute")),
            share_prefixes=rng.random() < 0.5,
            prefill_tokens=rng.randint(1, 60),
        )
        group = rng.choice(GROUPS)
        asked = []
        for number in range(rng.randint(1, 5)):
            source = on_disk.source(group, rng.choice((None, Link()))) if rng.random() < 0.6 else None
            prompt = [*CONTEXT, *SUFFIX] if source else [*CONTEXT[: rng.randint(1, 20)], number + 100]
            asked.append((submit(at, source, rng.randint(1, 12), prompt), source, prompt))
        at.run()
        for request, source, prompt in asked:
            plain = judged(on_disk.plain, prompt, request.output)
            if source is None:
                check_greedy(request.output, plain)
            elif request.preemptions == 0:
                check_greedy(request.output, on_disk.said(group, source.tokens, request.output))
                own += 1
        at.executor.close()
    assert own >= 30


def test_what_came_from_elsewhere_is_shared_with_nobody(pair, engine) -> None:
    """Not after a swap either, when it lies in other blocks."""
    at = engine(pair, blocks=17, host_blocks=40, scheduler="sarathi", preemption="swap", share_prefixes=True)
    first, request = at.submit([9] * 9, Sampling(40)), submit(at, pair.source(Group(0, 0)))
    while not request.finished:
        at.step()
    assert first.preemptions == 0 < request.preemptions, "nobody was swapped"
    after = submit(at, None)
    at.run()
    assert check_greedy(request.output, pair.said(Group(0, 0), len(CONTEXT), request.output)) == 8
    assert check_greedy(after.output, judged(pair.plain, [*CONTEXT, *SUFFIX], after.output)) == 8


def test_what_is_not_there_is_refused(pair, engine) -> None:
    with pytest.raises(CacheError):
        pair.source(Group(2, 4), prompt=[251, 252, 253])
    with pytest.raises(CacheError, match="another architecture"):  # and what else ``test_identity.py`` has
        pair.source(Group(2, 4), receiver=replace(pair.receiver, architecture="Qwen2ForCausalLM"))
    with pytest.raises(RequestError, match=r"group \[2, 9\) does not fit 6 layers"):
        pair.source(Group(2, 9))
    at = engine(pair)
    with pytest.raises(RequestError, match="a stored prefix of 48 tokens does not fit a prompt of 2; at least"):
        submit(at, pair.source(Group(2, 4)), prompt=[1, 2])
