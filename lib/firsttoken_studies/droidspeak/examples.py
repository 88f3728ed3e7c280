"""One item of each task, as a reader meets it, with what a receiver says over its own cache and over another's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from firsttoken.droidspeak.decode import greedy
from firsttoken.droidspeak.forward import cache_of
from firsttoken.droidspeak.prefill import full_prefill
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.study.profile import Profile
from firsttoken.study.record import Rows
from firsttoken_studies.droidspeak.setting import Run, Setting
from firsttoken_studies.droidspeak.tasks.load import task_of

SHOWN = 90  # characters of either end of a prompt


@torch.inference_mode()
def example_rows(profile: Profile, runs: Sequence[str]) -> Rows:
    """A row a run, as ``Run.parse`` reads it: both ends of its first item's prompt, what is expected, and both answers.

    The items are those that the profile's own runs judge with. Raises as ``Setting`` and its methods.
    """
    setting, rows = Setting(profile), []
    for run in map(Run.parse, runs):
        receiver, sender = setting.pair(run)
        _, (item, *_) = setting.items(run, receiver.tokenizer)
        prefix, task = Prefix.of([item.prefix], receiver.model.device), task_of(item.item)
        prompt = item.item.prefix + item.item.suffix
        row = {"run": run.name, "prompt": f"{prompt[:SHOWN]} ... {prompt[-SHOWN:]}", "expected": item.item.answers[0]}
        for how, variant in (("over its own cache", receiver), ("over the sender's", sender)):
            cache = cache_of(full_prefill(variant.model, prefix).kv)
            (row[how],) = greedy(
                receiver.model, receiver.tokenizer, prefix, [item.suffix], cache, task.answer_tokens, task.stop
            )
        rows.append(row)
    return rows
