"""Healing: what an adapter touches, what each loss is, what the teacher remembers, and that it learns."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import signal

import pytest
import torch
import torch.nn.functional as F

from firsttoken.progressiveserve.healing import (
    LOSSES,
    Teacher,
    TrainingState,
    _endless,
    _losses,
    _targets,
    attach,
    train,
)
from firsttoken.progressiveserve.passlayer import pass_layers
from firsttoken.progressiveserve.recipe import SEVEN_PROJECTIONS, Recipe
from firsttoken.progressiveserve.samples import Sample
from firsttoken.study.errors import FirstTokenError

SHORT = Sample("short", (11, 12, 13, 14, 15, 16), 4)
LONG = Sample("long", tuple(range(30, 50)), 13)
TEXT = Sample("text", tuple(range(60, 72)), 12)
OPEN = Sample("open", (81, 82, 83), 3)
QUICK = Recipe(
    name="quick", rank=4, alpha=8, dropout=0.0, learning_rate=1e-2, schedule="constant", accumulate=1, steps=12
)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def exact(monkeypatch):
    """Losses in fp32, so that they can be held against a formula."""
    monkeypatch.setattr(torch, "autocast", lambda *_: contextlib.nullcontext())


@pytest.fixture
def drawn():
    """A function that makes a generator."""
    return lambda seed=0: torch.Generator().manual_seed(seed)


def questions(count: int = 8) -> list[Sample]:
    """Questions of several lengths, whose answer is the same two tokens."""
    return [Sample(f"q{i}", (*range(20 + i, 26 + 2 * i), 200, 201), 6 + i) for i in range(count)]


def state(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def unchanged(before: dict[str, torch.Tensor], model) -> bool:
    after = dict(model.named_parameters())
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def first_and_last(curve, name: str) -> tuple[float, float]:
    values = [row[name] for row in curve.rows]
    return sum(values[:3]) / 3, sum(values[-3:]) / 3


def test_an_adapter_touches_the_named_layers_and_projections_only(make_model):
    peft = attach(make_model(layers=6), dataclasses.replace(QUICK, targets=("q_proj", "down_proj")), [0, 5])
    trainable = {name for name, p in peft.named_parameters() if p.requires_grad}
    expected = {
        f"base_model.model.model.layers.{i}.{part}.lora_{side}.default.weight"
        for i in (0, 5)
        for part in ("self_attn.q_proj", "mlp.down_proj")
        for side in "AB"
    }
    assert trainable == expected


def test_an_adapter_leaves_passed_layers_alone_and_starts_as_nothing(make_model, ids):
    model = make_model(layers=6)
    pass_layers(model, [2, 3])
    before = model(ids).logits
    peft = attach(model, QUICK, [0, 1, 4, 5])
    assert torch.equal(peft.eval()(ids).logits, before)
    touched = {name.split("layers.")[1].split(".")[0] for name, p in peft.named_parameters() if p.requires_grad}
    assert touched == {"0", "1", "4", "5"}
    count = sum(p.requires_grad for p in peft.parameters())
    assert count == 4 * len(SEVEN_PROJECTIONS) * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_answers_are_learned_and_the_base_stays(make_model, dtype):
    model = make_model().to(dtype)
    pass_layers(model, [1])
    peft = attach(model, QUICK, [0, 2, 3])
    assert {p.dtype for p in peft.parameters() if p.requires_grad} == {torch.float32}
    base = {name: tensor for name, tensor in state(peft).items() if "lora_" not in name}
    curve = train(peft, QUICK, questions())
    first, last = first_and_last(curve, "answer_loss")
    assert last < 0.5 * first
    assert [row["step"] for row in curve.rows] == list(range(1, 13))
    assert unchanged(base, peft)
    assert not peft.training and curve.duration_s > 0


def test_the_full_model_is_learned_from_where_there_are_no_answers(make_model):
    recipe = dataclasses.replace(QUICK, answer_weight=0.0, distill_weight=1.0, distill_share=1.0, text_batch=2)
    teacher = make_model()
    student = copy.deepcopy(teacher)
    pass_layers(student, [1])
    curve = train(attach(student, recipe, [0, 2, 3]), recipe, questions(), [TEXT, OPEN], Teacher(teacher))
    assert set(curve.rows[0]) == {"step", "distill_loss"}
    first, last = first_and_last(curve, "distill_loss")
    assert last < 0.8 * first


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(make_model):
    recipe = dataclasses.replace(QUICK, dropout=0.3, text_batch=1, distill_weight=1.0, steps=3)
    start = state(attach(make_model(), recipe, [0, 3]))

    def trained(seed: int) -> dict[str, torch.Tensor]:
        model = make_model()
        peft = attach(model, recipe, [0, 3])
        peft.load_state_dict(start, strict=False)  # tied weights have two names
        torch.rand(seed + 1)  # the global generator may stand anywhere
        train(peft, dataclasses.replace(recipe, seed=seed), questions(), [TEXT, OPEN], Teacher(make_model()))
        return state(peft)

    one, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_run_that_is_cut_goes_on_with_the_numbers_that_it_would_have_had(make_model, tmp_path, schedule):
    changes = {"dropout": 0.3, "text_batch": 1, "distill_weight": 1.0, "steps": 7, "accumulate": 2}
    recipe = dataclasses.replace(QUICK, schedule=schedule, warmup_steps=2, **changes)
    start, kept = state(attach(make_model(), recipe, [0, 3])), TrainingState(tmp_path / "new" / "state.safetensors")
    teacher = Teacher(make_model())  # one for all: its states are rounded otherwise in another batch

    def trained(keep: TrainingState | None = None, cut_at: int = 0) -> tuple[list[dict], dict[str, torch.Tensor]]:
        def watch(step: int) -> dict[str, float]:
            if step == cut_at:
                raise KeyboardInterrupt
            return {"validation_f1": float(torch.rand(()))}

        peft = attach(make_model(), recipe, [0, 3])
        peft.load_state_dict(start, strict=False)
        curve = train(peft, recipe, questions(), [TEXT, OPEN], teacher, watch, watch_every=2, state=keep)
        return curve.rows, state(peft)

    rows, weights = trained()
    for step in (4, 6):  # the second one goes on from the first one's state
        with pytest.raises(KeyboardInterrupt):
            trained(kept, cut_at=step)
    rows_again, weights_again = trained(kept)
    assert rows_again == rows and [row["step"] for row in rows] == [*range(1, 8)]
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())


def test_validation_joins_the_rows_while_the_model_is_in_eval_mode(make_model):
    peft = attach(make_model(), QUICK, [0])
    modes = []

    def watch(step: int) -> dict[str, float]:
        modes.append((step, peft.training))
        return {"validation_f1": step / 10}

    curve = train(peft, dataclasses.replace(QUICK, steps=5), questions(), watch=watch, watch_every=2)
    assert modes == [(2, False), (4, False), (5, False)]
    assert [row.get("validation_f1") for row in curve.rows] == [None, 0.2, None, 0.4, 0.5]
    last_only = train(peft, dataclasses.replace(QUICK, steps=3), questions(), watch=watch)
    assert [row["step"] for row in last_only.rows if "validation_f1" in row] == [3]


def test_targets_of_a_hand_made_batch(drawn):
    recipe = dataclasses.replace(QUICK, distill_share=0.0)
    text = dataclasses.replace(TEXT, tokens=(61, 62, 63, 64, 65), answer_start=5)
    answer, running, distilled = _targets([SHORT], [text, OPEN], 8, recipe, drawn())
    nothing = [0] * 8
    assert answer.int().tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], nothing, nothing]
    assert running.int().tolist() == [nothing, [1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    # the open prompt's last position is distilled, and so is what follows a window
    assert distilled.int().tolist() == [[0, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]


def test_answers_and_a_share_of_the_prompt_are_distilled(drawn):
    _, _, some = _targets([LONG] * 200, [], 20, dataclasses.replace(QUICK, distill_share=0.3), drawn())
    assert some[:, 12:19].all(), "every answer position"
    assert float(some[:, :12].float().mean()) == pytest.approx(0.3, abs=0.03)


def test_losses_are_their_formulas(make_model, randomised, drawn, exact):
    recipe = dataclasses.replace(
        QUICK, answer_weight=0.5, text_weight=2.0, distill_weight=3.0, distill_share=1.0, text_batch=2
    )
    full = make_model()
    student = copy.deepcopy(full)
    pass_layers(student, [2])
    peft = randomised(student, [0, 1, 3])
    parts = _losses(peft, recipe, [SHORT, LONG], [TEXT, OPEN], Teacher(full), drawn(), LOSSES)

    def predictions(model, sample: Sample) -> torch.Tensor:
        return model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)

    answers, running, divergence = [], [], []
    for sample in (SHORT, LONG, TEXT, OPEN):
        mine, theirs = predictions(peft, sample), predictions(full, sample)
        losses = -mine[:-1].gather(1, torch.tensor(sample.tokens[1:])[:, None])[:, 0]
        answers += losses[sample.answer_start - 1 :].tolist()
        running += losses.tolist() if sample in (TEXT, OPEN) else []
        divergence += (theirs.exp() * (theirs - mine)).sum(-1).tolist()
    assert len(answers) == 2 + 7
    expected = {"answer_loss": (0.5, answers), "text_loss": (2.0, running), "distill_loss": (3.0, divergence)}
    assert set(parts) == set(expected)
    for name, (weight, values) in expected.items():
        torch.testing.assert_close(parts[name].detach(), torch.tensor(weight * sum(values) / len(values)), **TOLERANCE)


def test_the_teacher_runs_each_sample_once_and_gives_its_final_states(make_model):
    model = make_model()
    calls = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    teacher = Teacher(model)
    cut = dataclasses.replace(LONG, tokens=LONG.tokens[5:], answer_start=8)  # as a shorter recipe takes it
    first = teacher.hidden([SHORT, LONG], 24)
    again = teacher.hidden([LONG, cut, SHORT], 20)
    assert calls == [2, 1]
    assert first.shape == (2, 24, 32) and again.shape == (3, 20, 32)
    for states, sample in ((first[0], SHORT), (first[1], LONG), (again[0], LONG), (again[1], cut), (again[2], SHORT)):
        direct = model.get_decoder()(torch.tensor([sample.tokens]), use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(states[: len(sample.tokens)], direct, **TOLERANCE)
        assert not states[len(sample.tokens) :].any()
    logits = model(torch.tensor([LONG.tokens])).logits[0]
    torch.testing.assert_close(F.linear(first[1][:20], model.lm_head.weight), logits, **TOLERANCE)


def test_batches_take_every_sample_once_before_any_again(drawn):
    samples = questions(5)
    batches = _endless(samples, 2, drawn())
    taken = [sample.key for _ in range(5) for sample in next(batches)]
    assert sorted(taken[:5]) == sorted(taken[5:]) == [s.key for s in samples]
    again = _endless(samples, 2, drawn())
    assert taken == [sample.key for _ in range(5) for sample in next(again)]
    assert [next(_endless(samples, 0, drawn())), next(_endless([], 0, drawn()))] == [[], []]


@pytest.mark.parametrize(("asked", "text_batch"), [([], 0), (questions(), 1)], ids=["no questions", "no text"])
def test_nothing_to_learn_from_is_an_error_and_no_endless_wait(make_model, asked, text_batch):
    def give_up(*_):
        raise TimeoutError("train waits for samples that never come")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 60)
    try:
        with pytest.raises(FirstTokenError) as caught:
            train(attach(make_model(), QUICK, [0]), dataclasses.replace(QUICK, text_batch=text_batch), asked)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert "\n" not in str(caught.value)
