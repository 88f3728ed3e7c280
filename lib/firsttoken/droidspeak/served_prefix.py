"""What an engine has computed for a request, as another model takes it: the sender's side while it serves.

DroidSpeak's sender keeps its KV cache, and hidden states at the edge that a receiver needs (report 4.2). In an engine
that hosts several fine-tunes both lie there after a prefill, and nothing is computed a second time.
"""

from __future__ import annotations

from collections.abc import Iterable

from firsttoken.droidspeak.prefix import LayerKV, PrefixCache
from firsttoken.engine.hidden_state_cache import HiddenStateCache
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request


def served_prefix(executor: LiveExecutor, request: Request, edges: Iterable[int] = ()) -> PrefixCache:
    """Return the cache of the prompt of ``request``, with the E-cache at ``edges``; the request goes on.

    Of a prefix that was itself taken from another model, the layers that were not computed again, and the E-cache at
    the lower edge of the group, are that model's. Raises RequestError where the prompt has not been computed, or no
    hidden states are kept at one of ``edges``.
    """
    tokens = request.prompt_tokens
    kv = executor.computed(request, tokens)
    boundary_cache = (request.version or executor.version).hidden_cache or HiddenStateCache(())
    e_cache = {edge: boundary_cache.of(request.number, edge)[:, :tokens].clone() for edge in edges}
    return PrefixCache(tuple(LayerKV(*layer) for layer in kv), e_cache)
