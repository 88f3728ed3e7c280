"""What a server adds to the operators of its cards: the time of its host between two steps, and the prompt tokens that
a scheduler of whole prompts puts into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from firsttoken.engine.costs.cost_model import Costs, follow, line_through
from firsttoken.study.errors import ProfileError

_MOST_ROWS = 1 << 11


@dataclass(frozen=True)
class Stack:
    """``host_ms`` has, by the number of GPUs and by the requests of a step, what the host takes between two steps."""

    prompt_tokens: int
    host_ms: Mapping[int, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def named(cls, name: str) -> Stack:
        """Raises ProfileError for a name that is none of ``STACKS``."""
        if name not in STACKS:
            raise ProfileError(f"no stack is called {name!r}; known: {', '.join(STACKS)}")
        return STACKS[name]

    def around(self, costs: Costs, gpus: int) -> Costs:
        """The ``costs`` of a step with the time of the host. Raises ProfileError for a number of GPUs without one."""
        if not self.host_ms:
            return costs
        if gpus not in self.host_ms:
            measured = ", ".join(map(str, self.host_ms))
            raise ProfileError(f"the host's time of {gpus} GPUs was not measured; measured: {measured}")
        return HostedCosts(costs, tuple(line_through(self.host_ms[gpus], _MOST_ROWS)))


@dataclass(frozen=True)
class HostedCosts(Costs):
    """The costs ``inner`` of a device that waits for its host after each step, as no engine of 2024 scheduled ahead."""

    inner: Costs
    host_ms: tuple[float, ...]  # [requests of the step]

    def step_s(self, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        count = len(prefills) + len(contexts)
        return self.inner.step_s(prefills, contexts) + (follow(self.host_ms, count) / 1e3 if count else 0.0)

    def decode_steps_s(self, contexts: Sequence[int], steps: int) -> list[float]:
        host_s = follow(self.host_ms, len(contexts)) / 1e3 if contexts else 0.0
        return [seconds + host_s for seconds in self.inner.decode_steps_s(contexts, steps)]

    def swap_out_s(self, tokens: int) -> float:
        return self.inner.swap_out_s(tokens)

    def swap_in_s(self, tokens: int) -> float:
        return self.inner.swap_in_s(tokens)


# The paper's baseline puts prompts of 8,192 tokens into a step. Its host's time is that of microsoft/vidur at 6d98aa8f,
# data/profiling/a100/cpu_overheads.csv: means of scheduling, preparing inputs, sampling and processing outputs in the
# engine of Sarathi-Serve, and of Ray's messages. One GPU ran Llama-2-7B, two CodeLlama-34B, four Llama-2-70B.
STACKS = {
    "bare": Stack(2048),
    "sarathi-2024": Stack(
        8192,
        {
            1: {8: 1.478, 16: 1.850, 32: 2.407, 64: 4.094, 128: 7.399},
            2: {8: 8.182, 16: 8.519, 32: 9.169, 64: 11.113, 128: 14.022},
            4: {8: 8.477, 16: 8.861, 32: 9.484, 64: 11.354, 128: 14.241},
        },
    ),
}
