"""A healing recipe: every parameter of a healing run, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass

SEVEN_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """A LoRA healing recipe. The defaults are the report's (3.3.3): r 8, alpha 16, dropout 0.05, 4 x 16, lr 2e-4.

    ``batch`` question sequences and ``text_batch`` text sequences make a micro-batch, ``accumulate`` of them a step.
    Training lasts ``steps``, or ``epochs`` over the questions where ``steps`` is 0. Three losses are added up:
    cross-entropy on the answer, cross-entropy on running text, and the KL divergence from the full model's next-token
    distribution, taken at every answer token and at a random ``distill_share`` of the others.
    """

    name: str = "report"
    rank: int = 8
    alpha: int = 16
    dropout: float = 0.05
    targets: tuple[str, ...] = SEVEN_PROJECTIONS
    learning_rate: float = 2e-4
    schedule: str = "linear"
    warmup_steps: int = 0
    batch: int = 4
    text_batch: int = 0
    accumulate: int = 16
    steps: int = 0
    epochs: int = 3
    answer_weight: float = 1.0
    text_weight: float = 0.0
    distill_weight: float = 0.0
    distill_share: float = 0.3
    max_tokens: int = 160
    seed: int = 0

    def total_steps(self, questions: int) -> int:
        """Optimizer steps of a run over ``questions`` training questions."""
        return self.steps or max(1, self.epochs * questions // (self.batch * self.accumulate))


REPORT = Recipe()
"""The report's recipe, every value as in 3.3.3 (its Trainer's defaults elsewhere: linear decay, no warm-up)."""

OURS = Recipe(
    name="ours",
    rank=6,
    alpha=12,
    dropout=0.0,
    learning_rate=3e-3,
    schedule="cosine",
    warmup_steps=10,
    batch=4,
    text_batch=2,
    accumulate=1,
    steps=240,
    distill_weight=1.0,
)
"""Answers, and the full model's own predictions on questions, Wikipedia and open prompts; rank 6 for a smaller file."""

TASK = Recipe(
    name="task",
    rank=4,
    alpha=8,
    dropout=0.0,
    learning_rate=3e-3,
    schedule="cosine",
    warmup_steps=5,
    batch=8,
    text_batch=2,
    accumulate=1,
    steps=80,
    text_weight=0.5,
)
"""What tunes the full model to short answers; text beside it keeps its perplexity where it was."""

RECIPES = {recipe.name: recipe for recipe in (REPORT, OURS, TASK)}
