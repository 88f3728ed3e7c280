"""A swarm as a segment of the engine's decoder, and as a model to generate with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from firsttoken.engine.decoder import Decoder
from firsttoken.engine.engine import DEFAULT_CONFIG, Engine, EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Sampling
from firsttoken.engine.step_plan import StepPlan
from firsttoken.petals.access import Access
from firsttoken.petals.chain import Chain
from firsttoken.petals.checkpoint_blocks import load_ends, model_sha256
from firsttoken.petals.event_loop import begin, wait_for
from firsttoken.petals.messages import SequenceChunk
from firsttoken.petals.swarm import Swarm
from firsttoken.petals.timeouts import Timeouts
from firsttoken.petals.trust.auditor import Auditor, Audits
from firsttoken.petals.wire import CODINGS
from firsttoken.study.errors import RequestError, SwarmError

UNAUDITED = (
    "no answer is audited: whatever the servers of this swarm compute is believed; `firsttoken swarm generate "
    "--audit-rate 0.1` has a share of it computed again by others"
)
"""What a user is told once where answers are not audited."""


class RemoteSegment:
    """``chain`` as a segment of a decoder; it is asked by the engine's thread, and lives in the swarm's."""

    def __init__(self, chain: Chain) -> None:
        self.layers, self.chain = chain.layers, chain

    def run(self, hidden: Tensor, step: StepPlan) -> Tensor:
        """``hidden`` [1, tokens, hidden] through all of its layers -> the same shape.

        Raises SwarmError when nobody serves them in time, RequestError for a step through a part of them.
        """
        through = step.within(self.layers)
        if not len(through):
            return hidden
        if through != self.layers:
            raise RequestError(
                f"layers [{through.start}, {through.stop}) lie among [{self.layers.start}, {self.layers.stop}) of a "
                "swarm, which a step runs as a whole"
            )
        if step.hidden_cache is not None:
            step.hidden_cache.enter(self.layers.start, hidden, step.chunks)
        chunks = [SequenceChunk(chunk.request.number, chunk.start, chunk.end) for chunk in step.chunks]
        out = wait_for(self.chain.run(chunks, hidden[0].cpu()))
        return out[None].to(hidden.device)

    def drop(self, request: int) -> None:
        """Forget the request of this number, here and on the servers."""
        begin(self.chain.forget([request]))


class RemoteModel(AbstractContextManager["RemoteModel"]):
    """The model in ``folder`` with its ends here, and its blocks on the swarm that ``peers`` (HOST:PORT) belong to.

    Its ends compute on ``device``; ``engine`` is the engine over it, for what serves and schedules. Hidden states
    travel in ``coding`` (by default what the ends compute in). ``variants`` of the model are in ``versions``: by name,
    those whose servers have the adapter that is named for it, unaudited (PETALS' own servers have adapters too, and a
    request names its ``active_adapter``: client/routing/sequence_manager.py of bigscience-workshop/petals). ``audits``
    are the spot checks that it makes. Use it as a context manager. Raises ModelError for a folder that holds no ends,
    SwarmError for a coding that is unknown or cannot be audited, and when nobody answers.
    """

    def __init__(
        self,
        folder: Path,
        peers: Sequence[str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        coding: str = "",
        timeouts: Timeouts | None = None,
        access: Access | None = None,
        audits: Audits | None = None,
        tokens: int = 16384,
        config: EngineConfig = DEFAULT_CONFIG,
        variants: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        coding = coding or str(dtype).removeprefix("torch.")
        if coding not in CODINGS:
            raise SwarmError(f"no coding is called {coding!r}; known: {', '.join(CODINGS)}")
        if audits is not None and (dtype, CODINGS[coding]) != (torch.float32, torch.float32):
            raise SwarmError("audits compare answers in float32: set dtype and coding to float32, or audit nothing")
        self.model = load_ends(folder, dtype, device)
        width, depth = self.model.config.hidden_size, self.model.config.num_hidden_layers
        self.swarm = Swarm(model_sha256(folder), peers, width, access or Access(), timeouts or Timeouts())
        wait_for(self.swarm.connect())
        auditor = None if audits is None else Auditor(self.swarm, audits)
        self.chain = Chain(self.swarm, range(depth), coding, auditor)
        self._chains = {
            name: Chain(self.swarm, range(depth), coding, adapter=adapter) for name, adapter in variants.items()
        }
        chains = {"": self.chain} | self._chains
        self.segments = {name: RemoteSegment(chain) for name, chain in chains.items()}
        self.executor = LiveExecutor(self.model, -(-tokens // 16), segments=[self.segments[""]], elsewhere=True)
        self.engine = Engine(self.executor, replace(config, share_prefixes=False))  # servers have the keys and values
        self.versions = {name: ModelVersion(Decoder(self.model, [self.segments[name]]), stage=1) for name in variants}
        # A step of one token reads all of the head: 7 ms by torch's own product, 2 where it is packed (135 M, float32).
        self.executor.version.decoder.pack_head()
        for version in self.versions.values():
            version.decoder.share_head(self.executor.version.decoder)
        self._refreshing = begin(self.swarm.keep_refreshing())

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 16,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] = (),
        pad_token_id: int = 0,
        seed: int = 0,
        variant: str = "",
        on_token: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """``input_ids`` [batch, tokens] -> [batch, tokens + at most ``max_new_tokens``], rows that end early padded; by
        the ``variant`` of this name, if one is named. ``on_token`` is called with each token as it comes, and its row.

        Row i draws with ``seed`` + i; temperature 0 is greedy. Raises RequestError for ids that are no batch or that
        the model cannot take, SwarmError when blocks stay unserved.
        """
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise RequestError(f"input_ids must be whole numbers [batch, tokens], not {list(input_ids.shape)}")
        stop = (eos_token_id,) if isinstance(eos_token_id, int) else tuple(eos_token_id)
        engine = self.engine
        requests = []
        try:
            for row, prompt in enumerate(input_ids.tolist()):
                sampling = Sampling(max_new_tokens, temperature, top_p, stop, seed + row)
                requests.append(engine.submit(prompt, sampling, version=self.versions[variant] if variant else None))
            while on_token is not None and engine.busy:
                for request, token in engine.step():
                    on_token(requests.index(request), token)
            engine.run()
        finally:
            for request in requests:
                engine.cancel(request)  # does nothing for one that is done
        longest = max((len(request.output) for request in requests), default=0)
        outputs = [request.output + [pad_token_id] * (longest - len(request.output)) for request in requests]
        new = torch.tensor(outputs, dtype=input_ids.dtype).view(len(outputs), longest)
        return torch.cat([input_ids, new.to(input_ids.device)], dim=1)

    def close(self) -> None:
        self.executor.close()
        self._refreshing.cancel()

        async def end() -> None:
            for chain in (self.chain, *self._chains.values()):
                chain.close()
            await self.swarm.close()

        wait_for(end())

    def __exit__(self, *exc_info: object) -> None:
        self.close()
