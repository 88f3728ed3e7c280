"""Prefix sharing: the same prompt is prefilled once, nobody writes to what others read, and each says what it says."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence

import peft
import pytest
import torch
from chunked import Chunked
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import Listening
from plain_tokens import generated

from firsttoken.engine import block_pool
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.preemption.victims import VICTIMS
from firsttoken.engine.request import Kind, Phase, Request, Sampling, ScheduledChunk
from firsttoken.engine.schedulers import SCHEDULERS

SHARED = {"share_prefixes": True}


def prefilled(run) -> int:
    return run.engine.token_counts[Kind.PREFILL]


def watch_writes(run) -> None:
    """From now on each step is held to: what it writes to belongs to one, or nobody else wants it before it is read."""
    engine, size = run.engine, run.engine.executor.block_tokens
    execute = engine.executor.execute

    def checked(chunks: Sequence[ScheduledChunk]) -> list[int]:
        written: Counter[int] = Counter()
        for chunk in chunks:
            places = range(chunk.start // size, -(-chunk.end // size))
            written.update(chunk.request.blocks[place] for place in places)
            for place in places:
                block = chunk.request.blocks[place]
                others = [other for other in run.requests if other is not chunk.request and block in other.blocks]
                assert len(others) + 1 == engine.pool.owners(block)
                if others:
                    assert chunk.end >= (place + 1) * size, "a block is shared that is not full"
                for other in others:
                    assert other.cached >= (place + 1) * size and other.number in {one.request.number for one in chunks}
        assert not written or max(written.values()) == 1, "two write to one block"
        return execute(chunks)

    engine.executor.execute = checked


# -- once is enough


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_sixteen_with_one_prompt_prefill_it_once(lab, llama, scheduler: str, together: bool) -> None:
    """But for the last token of each, without which there is nothing to say; the prompt's 33 tokens fill 8 blocks."""
    one = next(one for one in llama.known if len(one.prompt) == 33)
    live = lab.live(llama.model, 200, scheduler=scheduler, **SHARED)
    for run in (live, lab.simulated(200, scheduler=scheduler, **SHARED)):
        for _ in range(16):
            run.submit(one.prompt, Sampling(6), 0.0)
            if not together:
                run.step()
        outputs = run.finish()
        assert prefilled(run) == 33 + 15 and run.engine.prefixes.hit_tokens == 15 * 32
        assert run.engine.prefixes.query_tokens == 16 * 33
        if run is live:
            assert outputs == [list(one.answer[:6])] * 16


@pytest.mark.parametrize(("length", "found"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_full_blocks_are_shared_and_never_the_last_tokens(lab, length: int, found: int) -> None:
    run = lab.simulated(50, **SHARED)
    for _ in range(2):
        run.submit(range(length), Sampling(1), 0.0)
    run.finish()
    assert run.engine.prefixes.hit_tokens == found and prefilled(run) == 2 * length - found


def test_a_conversation_goes_on_where_it_was(lab, llama) -> None:
    """What was said before is found in the blocks of the request that said it, though that has ended."""
    one = llama.known[-1]
    run = lab.live(llama.model, 100, **SHARED)
    first = run.submit(one.prompt, Sampling(12))
    run.finish()
    second = run.submit([*one.prompt, *first.output], Sampling(12))
    assert run.finish() == [list(one.answer[:12]), list(one.answer[12:24])]
    assert second.prompt_tokens == 52 and prefilled(run) == 40 + (52 - 48)  # the last token said was never cached


def test_what_others_need_drives_out_what_nobody_has(lab) -> None:
    run = lab.simulated(5, **SHARED)
    for first in (1, 2, 1, 3, 1):  # each fills all 5 blocks
        run.submit([first] * 17, Sampling(4))
        run.finish()
    assert prefilled(run) == 5 * 17 and run.engine.prefixes.hit_tokens == 0
    run.submit([1] * 17, Sampling(4))
    run.finish()
    assert run.engine.prefixes.hit_tokens == 16


def test_the_budget_is_for_what_has_to_be_prefilled(lab) -> None:
    run = lab.simulated(100, prefill_tokens=40, **SHARED)
    for _ in range(4):
        run.submit([7] * 33, Sampling(2), 0.0)
    run.step()
    assert run.trace.steps[0].prefills == ((0, 33), (32, 1), (32, 1), (32, 1))


def test_another_salt_shares_nothing(lab, llama) -> None:
    """Neither blocks that somebody has, nor those of requests that have ended."""
    one = next(one for one in llama.known if len(one.prompt) == 33)
    run, found = lab.live(llama.model, 200, **SHARED), []
    for salt in ("", "a", "b", "a", "", "ab", "a\0", "b"):
        before = run.engine.prefixes.hit_tokens
        run.submit(one.prompt, Sampling(4, cache_salt=salt), 0.0)
        run.step()
        found.append(run.engine.prefixes.hit_tokens - before)
        if salt == "b":
            run.finish()
    assert found == [0, 0, 0, 32, 32, 0, 0, 32] and run.finish() == [list(one.answer[:4])] * 8


# -- preemption


def test_a_shared_block_is_not_swapped_away_under_others(lab, llama) -> None:
    one = next(one for one in llama.known if len(one.prompt) == 40)
    run = lab.live(llama.model, 200, host_blocks=200, preemption="swap", **SHARED)
    both = [run.submit(one.prompt, Sampling(24), 0.0) for _ in range(2)]
    run.until(lambda: both[1].times_s)
    kept = run.engine.executor.pool.rows[both[0].blocks[:9]].clone()
    run.engine.scheduler.preempt(both[1])
    assert both[1].phase is Phase.SWAPPED and run.engine.pool.owners(both[0].blocks[0]) == 1
    assert torch.equal(run.engine.executor.pool.rows[both[0].blocks[:9]], kept)
    run.engine.executor.pool.rows[both[0].blocks[:9]] = kept  # and the copy on the host is its own
    assert run.finish() == [list(one.answer)] * 2


def test_what_is_recomputed_finds_its_own_blocks(lab) -> None:
    """And no policy is told that a prefill from nothing is as cheap."""
    policy = Listening(lambda tokens: Action.RECOMPUTE)
    run = lab.simulated(200, policy=policy, **SHARED)
    request = run.submit([0] * 20, Sampling(8))
    run.until(lambda: len(request.times_s) == 5)
    run.engine.scheduler.preempt(request)
    run.finish()
    (recovery,) = run.trace.recoveries
    assert request.computed == 27 and recovery.tokens == 1 and run.engine.token_counts[Kind.RECOMPUTE] == 0
    assert [one.tokens for one in policy.seen] == [20] and not run.engine.preemptor._open


@settings(max_examples=120, deadline=None)
@given(
    asked=st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=24),
            st.integers(1, 12),
            st.floats(0, 20),
            st.sampled_from(["", "", "a", "b"]),
        ),
        min_size=2,
        max_size=9,
    ),
    scheduler=st.sampled_from([*SCHEDULERS, "prefill_first", "chunked", "chunked"]),
    block_tokens=st.integers(1, 5),
    spare=st.integers(0, 12),
    watermark=st.sampled_from([0.0, 0.2]),
    host_blocks=st.sampled_from([0, 8, 1000]),
    overlap=st.booleans(),
    victim=st.sampled_from(sorted(VICTIMS)),
    seed=st.integers(0, 2**32),
)
def test_no_block_is_lost_or_written_to_by_two(
    lab, asked, scheduler, block_tokens, spare, watermark, host_blocks, overlap, victim, seed
) -> None:
    """Prompts of two tokens often begin alike. Every step is audited: owners, keys, and who writes where; and no block
    is found under two salts."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULERS, "chunked", type("Pieces", (Chunked,), {"pieces": rng.randint(1, 20)}))
        sizes = [(len(prompt), new) for prompt, new, _, _ in asked]
        run = lab.simulated(
            lab.smallest_pool(sizes, block_tokens, watermark) + spare,
            policy=Listening(lambda tokens: rng.choice(list(Action))),
            block_tokens=block_tokens,
            scheduler=scheduler,
            watermark=watermark,
            host_blocks=host_blocks,
            overlap=overlap,
            victim=victim,
            **SHARED,
        )
    watch_writes(run)
    for prompt, new, at_s, salt in asked:
        run.submit(prompt, Sampling(new, cache_salt=salt), at_s)
    salts: dict[bytes, str] = {}
    while run.engine.busy:
        run.step()
        for request in run.requests:
            salt = request.sampling.cache_salt
            assert all(salts.setdefault(key, salt) == salt for key in request.keys[1:])
        if rng.random() < 0.05:
            run.engine.cancel(rng.choice(run.requests))
            run.audit()
        if run.engine.scheduler.running and scheduler in ("prefill_first", "chunked") and rng.random() < 0.05:
            run.engine.scheduler.preempt(rng.choice(run.engine.scheduler.running))
            run.audit()
    run.all_back()
    sharing = run.engine.prefixes
    assert 0 <= sharing.hit_tokens < sharing.query_tokens
    assert not run.engine.preemptor._open and not run.engine.preemptor._prefills
    for request in run.requests:
        booked = [entry for step in run.trace.steps for entry in step.token_spans if entry.request == request.number]
        tokens = Counter(
            t for entry in booked if entry.kind is not Kind.RECOMPUTE for t in range(entry.start, entry.end)
        )
        assert not tokens or max(tokens.values()) == 1
        if len(request.output) == request.sampling.max_tokens:
            first = min(tokens)  # all before it was found
            assert set(tokens) == set(range(first, request.most_cached)) and first % block_tokens == 0


# -- the tokens stay, as ``test_engine_equality.py`` shows of schedules that share


def test_these_models_notice_blocks_of_another_prefix(lab, llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: one shared block that holds something else, and keys that do not hang on what came before."""
    one = llama.known[-1]
    run = lab.live(llama.model, 100, **SHARED)
    first = run.submit(one.prompt, Sampling(1))
    run.step()
    run.engine.executor.pool.rows[3] = 0
    run.submit(one.prompt, Sampling(24))
    assert first.finished and run.finish()[1] != list(one.answer) and run.engine.prefixes.hit_tokens == 36
    monkeypatch.setattr(
        block_pool, "blake2b", lambda data, digest_size: type("", (), {"digest": lambda _: data[-8:]})()
    )
    run = lab.live(llama.model, 100, block_tokens=1, **SHARED)
    run.audit = lambda: None
    for prompt in ([one.prompt[1], one.prompt[0], *one.prompt[2:]], one.prompt):
        run.submit(prompt, Sampling(24))
    assert run.finish()[1] != list(one.answer)


def test_another_adapter_is_another_prefix(lab, llama) -> None:
    lab.close()
    with torch.random.fork_rng():
        torch.manual_seed(7)  # peft draws half of an adapter, and by chance one of its tokens was a near tie
        config = peft.LoraConfig(r=4, target_modules="all-linear")
        model = peft.get_peft_model(copy.deepcopy(llama.model), config, "one")
        model.add_adapter("two", copy.deepcopy(config))
    draw = torch.Generator().manual_seed(7)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    prompt, said = llama.known[-1].prompt, {}
    for name in ("one", "two"):
        model.set_adapter(name)
        said[name] = generated(model, prompt, 12)
    with model.disable_adapter():
        said["none"] = generated(model, prompt, 12)
    assert len({tuple(plain.exact()) for plain in said.values()}) == 3
    run = lab.live(model, 200, **SHARED)
    for name in ("one", "two", "one", "two"):
        model.set_adapter(name)
        request = run.submit(prompt, Sampling(12))
        run.finish()
        assert request.output == said[name].tokens
    with model.disable_adapter():
        request = run.submit(prompt, Sampling(12))
        run.finish()
        assert request.output == said["none"].tokens
    assert run.engine.prefixes.hit_tokens == 2 * 36


class Fails(LiveExecutor):
    """Does not do the second step."""

    steps = 0

    def execute(self, chunks: Sequence[ScheduledChunk]) -> list[int]:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("out of memory")
        return super().execute(chunks)


def test_what_a_failed_step_was_to_write_is_not_found(lab, llama) -> None:
    first, second = llama.known[-2:]
    run = lab.live(llama.model, 100, kind=Fails, **SHARED)
    run.submit(first.prompt, Sampling(1))
    run.finish()
    failed: list[Request] = [run.submit(one.prompt, Sampling(4), 0.0) for one in (first, second, second)]
    with pytest.raises(RuntimeError, match="out of memory"):
        run.engine.step()
    for request in failed:
        run.engine.cancel(request)
    run.all_back()
    before = run.engine.prefixes.hit_tokens
    again = run.submit(second.prompt, Sampling(4))
    run.finish()
    assert again.output == list(second.answer[:4]) and run.engine.prefixes.hit_tokens == before
