"""Stages of a tiny model, all in memory, as views of the same weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from growing import OURS, TIMEOUT_S
from torch import nn
from transformers import PreTrainedModel

from firsttoken.assets.adapter_files import CONFIG, WEIGHTS
from firsttoken.engine.lora import parse_adapter
from firsttoken.engine.request_limits import RequestLimits
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.loading.views import StageView, make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.progressiveserve.staged_serving.transitions import Transition
from firsttoken_cpu.before_torch.numpy_answers import NumpyAnswers
from firsttoken_cpu.before_torch.numpy_model import NumpyModel
from firsttoken_cpu.before_torch.stage_weights import StageWeights
from firsttoken_serve import retrying_server
from firsttoken_serve.retrying_server import StagedService

Views = Callable[..., list[StageView]]


@pytest.fixture
def views() -> Views:
    """Makes a view for each set of layers that are missing; ``adapters`` are PEFT folders or None, one for each."""

    whole: dict[int, list[nn.Module]] = {}  # activating a view changes the model's own list

    def make(model: PreTrainedModel, missing: Sequence[Sequence[int]], adapters: Sequence = ()) -> list[StageView]:
        ends = {"embed_tokens": model.model.embed_tokens, "norm": model.model.norm, "lm_head": model.lm_head}
        layers = whole.setdefault(id(model), list(model.model.layers))
        passed = [PassLayer() for _ in layers]
        made = []
        for number, gone in enumerate(missing, start=1):
            base = [passed[i] if i in gone else layer for i, layer in enumerate(layers)]
            folder = adapters[number - 1] if adapters else None
            files = [(folder / name).read_bytes() for name in (CONFIG, WEIGHTS)] if folder else None
            adapter = parse_adapter(str(number), *files, "cpu") if files else None
            made.append(make_view(number, base, ends, adapter))
        return made

    return make


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., StagedService]]:
    """Starts servers, and at the end holds them to having ended: none of their threads is left. With ``early`` the
    first stage answers by numpy until torch's engine is there.

    What was mended is found soon, though a slow machine has failed many times by then: answers are open meanwhile.
    """
    monkeypatch.setattr(retrying_server, "LONGEST_PAUSE_S", 0.05)
    servers: list[StagedService] = []

    def start(staged, link: Link | None = None, policy: Transition | None = None, **config) -> StagedService:
        own = {name: config.pop(name) for name in ("threads", "recover", "retry_s") if name in config}
        options = {"policy": policy, "retry_s": 0.02} | own
        link = link or Link()
        if config.pop("early", False):
            maker = ThreadPoolExecutor(1)
            coming = maker.submit(lambda: NumpyModel(StageWeights(staged.folder, [link]), threads=1))
            options["early"] = partial(NumpyAnswers, coming)
            maker.shutdown(wait=False)
        server = StagedService(staged.folder, [link], RequestLimits(**config), **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        closing.join(TIMEOUT_S)
        assert not closing.is_alive(), "close() does not end"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(OURS)]
