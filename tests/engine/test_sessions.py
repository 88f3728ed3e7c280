"""Sessions of several turns: whatever becomes of their idle blocks, they say the same, and every block comes back."""

from __future__ import annotations

import random

import pytest

from firsttoken.engine.sessions import IDLE_RULES, AgentSession, IdleBlocks, Keep, Turn, min_waste, serve_sessions
from firsttoken.study.errors import ProfileError, RequestError


def drawn(seed: int, vocabulary: int, count: int = 5) -> list[AgentSession]:
    """Sessions that come at once, some of which begin alike."""
    draw = random.Random(seed)

    def text(least: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(draw.randint(least, 14)))

    common = text(8)
    return [
        AgentSession(
            0.0,
            tuple(
                Turn((common if turn == 0 and number % 2 else ()) + text(1), draw.randint(1, 7), draw.uniform(0, 0.02))
                for turn in range(draw.randint(1, 4))
            ),
        )
        for number in range(count)
    ]


def outputs(run, sessions: list[AgentSession], rule) -> list[list[list[int]]]:
    served = serve_sessions(run.engine, sessions, rule, lambda tokens: tokens * 1e-3)
    run.engine.pool.check()
    assert run.engine.pool.free == run.engine.pool.count, "a block is still held"
    return [[request.output for request in requests] for requests in served]


@pytest.mark.parametrize("policy", ["recompute", "swap"])
def test_the_tokens_are_the_same_under_every_rule(lab, llama, policy) -> None:
    """Exactly, beside sessions that run one after the other in a pool that has room for all."""
    preempted = 0
    for seed in range(4):
        sessions, roomy = drawn(seed, 96), {"blocks": 200, "share_prefixes": True}
        alone = [outputs(lab.live(llama.model, **roomy), [session], IDLE_RULES["discard"])[0] for session in sessions]
        most = max(-(-session.tokens // 4) for session in sessions)
        for name, rule in IDLE_RULES.items():
            run = lab.live(llama.model, most + 2, share_prefixes=True, preemption=policy, host_blocks=100)
            assert outputs(run, sessions, rule) == alone, name
            preempted += run.engine.scheduler.preempted
    assert preempted


@pytest.mark.parametrize("rule", IDLE_RULES.values(), ids=IDLE_RULES)
@pytest.mark.parametrize("watermark", [0.0, 0.1])
def test_all_sessions_end_in_the_smallest_pool(lab, rule, watermark) -> None:
    """No hold keeps out the request that alone could run, and none outlives its session."""
    for seed in range(40):
        sessions = drawn(seed, 1000)
        blocks = max(-(-session.tokens // 4) for session in sessions)
        while blocks - int(watermark * blocks) < max(-(-session.tokens // 4) for session in sessions):
            blocks += 1
        served = outputs(lab.simulated(blocks, watermark=watermark, share_prefixes=True), sessions, rule)
        assert [[len(said) for said in turns] for turns in served] == [
            [turn.answer_tokens for turn in session.turns] for session in sessions
        ]


def test_a_turn_may_begin_and_end_in_the_step_in_which_its_tool_returns(lab) -> None:
    sessions = [AgentSession(0.0, (Turn((1,) * 40, 4, 5.0), Turn((2,), 1), Turn((3,), 1)))]
    outputs(lab.simulated(40, share_prefixes=True), sessions, IDLE_RULES["preserve"])
    outputs(lab.simulated(40, share_prefixes=True), [AgentSession(0.0, sessions[0].turns[:2])], IDLE_RULES["preserve"])


def test_blocks_behind_the_watermark_are_not_held(lab) -> None:
    sessions = [
        AgentSession(0.0, (Turn((1,) * 37, 2, 5.0), Turn((2,) * 4, 2))),
        AgentSession(1.0, (Turn((3,) * 31, 2, 50.0), Turn((4,) * 4, 2))),
    ]
    outputs(lab.simulated(20, watermark=0.1, share_prefixes=True), sessions, IDLE_RULES["preserve"])


def found(lab, rule, blocks: int = 40) -> dict[int, int]:
    """Tokens of the second turn of two sessions, by the seconds of their tools, that need no computing, where another
    request came between that needs some of their blocks."""
    waits = (20, 60)
    sessions = [AgentSession(0.0, (Turn((wait,) * 40, 4, wait, wait), Turn((9,), 4))) for wait in waits]
    run = lab.simulated(blocks, share_prefixes=True)
    served = serve_sessions(run.engine, [*sessions, AgentSession(10.0, (Turn((3,) * 100, 4),))], rule, float)
    starts: dict[int, int] = {}
    for step in run.trace.steps:
        for chunk in step.chunks:
            starts.setdefault(chunk.request.number, chunk.start)
    return {wait: starts[turns[1].number] for wait, turns in zip(waits, served, strict=False)}


def test_idle_blocks_are_found_again_as_the_rule_says(lab) -> None:
    """All ten full blocks of four, none, or, of the one that comes back first, some where it went first."""
    every, rules = {20: 40, 60: 40}, IDLE_RULES
    assert found(lab, rules["cache"], 200) == found(lab, rules["preserve"], 200) == every
    assert found(lab, rules["discard"], 200) == {20: 0, 60: 0}
    assert found(lab, lambda idle: Keep(first_out=idle.tool_s == 20))[20] < 40
    assert found(lab, rules["cache_short"])[20] == 40 > found(lab, rules["cache_short"])[60]


def test_what_is_held_nobody_else_gets(lab) -> None:
    """Of two requests of 26 blocks both run at once where idle blocks are found, and one after the other beside what
    two sessions hold."""

    def begun_s(rule) -> list[float]:
        sessions = [AgentSession(0.0, (Turn((number,) * 40, 4, 90), Turn((9,), 4))) for number in (1, 2)]
        sessions += [AgentSession(10.0, (Turn((number,) * 100, 4),)) for number in (3, 4)]
        run = lab.simulated(64, share_prefixes=True)
        return [turns[0].begun_s for turns in serve_sessions(run.engine, sessions, rule, float)[2:]]

    first_s, second_s = begun_s(IDLE_RULES["cache"])
    assert first_s == second_s
    first_s, second_s = begun_s(IDLE_RULES["preserve"])
    assert first_s < second_s < 90


def test_min_waste_holds_what_is_short_to_wait_for_and_long_to_compute() -> None:
    assert min_waste(IdleBlocks(share=0.1, tool_s=1.0, recompute_s=0.2)).hold_s > 0
    assert min_waste(IdleBlocks(share=0.1, tool_s=3.0, recompute_s=0.2)).hold_s == 0


def test_an_engine_without_a_prefix_cache_is_refused(lab) -> None:
    with pytest.raises(ProfileError, match="share_prefixes"):
        serve_sessions(lab.simulated(40).engine, [], IDLE_RULES["cache"], float)


def test_a_session_that_can_never_fit_is_refused(lab) -> None:
    with pytest.raises(RequestError, match="a turn, and room for all of its tokens in 4 blocks"):
        outputs(lab.simulated(4, share_prefixes=True), [AgentSession(0.0, (Turn((1,) * 30, 4),))], IDLE_RULES["cache"])
    with pytest.raises(RequestError, match="each needs a turn"):
        outputs(lab.simulated(4, share_prefixes=True), [AgentSession(0.0, ())], IDLE_RULES["cache"])
