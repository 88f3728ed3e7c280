"""What honest servers may differ by: their answers beside those of transformers' own layers, and of float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from firsttoken.petals.background import wait_for
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.trust.court import difference
from firsttoken.petals.wire import Stretch
from firsttoken.study.record import Rows


@torch.inference_mode()
def rounding(swarm: Swarm, model: nn.Module, spans: Sequence[range], prompts: Sequence[list[int]]) -> Rows:
    """Rows {what: rounding, against: float32 | float64, difference}, one for each of ``spans`` and ``prompts``.

    ``model`` is the same one in this process, in float32; it is in float64 afterwards.
    """
    entering = []
    for prompt in prompts:
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        entering += [(span, states[span.start][0]) for span in spans]
    said = [wait_for(_answer(swarm, span, inputs)) for span, inputs in entering]
    rows: Rows = []
    for kind in (torch.float32, torch.float64):
        model.to(kind)
        for (span, inputs), one in zip(entering, said, strict=True):
            apart = difference(one.to(kind), _through(model, span, inputs.to(kind)))
            rows.append({"what": "rounding", "against": str(kind).removeprefix("torch."), "difference": apart})
    return rows


async def _answer(swarm: Swarm, span: range, inputs: Tensor) -> Tensor:
    """What a server of just ``span`` answers to ``inputs`` [tokens, hidden]."""
    line = swarm.line(next(one for one in swarm.servers() if one.span == span), span, "float32")
    try:
        return await line.run([Stretch(0, 0, len(inputs))], inputs)
    finally:
        line.close()


def _through(model: nn.Module, span: range, inputs: Tensor) -> Tensor:
    """``inputs`` [tokens, hidden] after the layers ``span`` of transformers' model, without its last norm."""
    body = model.model
    whole = body.layers, body.norm
    body.layers, body.norm = body.layers[span.start : span.stop], nn.Identity()
    try:
        return body(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
    finally:
        body.layers, body.norm = whole
