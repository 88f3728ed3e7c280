"""What can never run is refused before it is taken."""

from __future__ import annotations

from firsttoken.engine.blocks import BlockPool
from firsttoken.engine.brought import PrefixSource
from firsttoken.engine.executor import Executor
from firsttoken.engine.request import Request
from firsttoken.study.errors import RequestError


def check_admission(request: Request, source: PrefixSource | None, executor: Executor, pool: BlockPool) -> None:
    """Raises RequestError for more tokens than the model's context or ``pool`` can ever hold, a token outside the
    vocabulary, and a ``source`` of all tokens of the prompt or more, or of a prompt whose own chances are asked for."""
    limits, most = executor.limits, request.prompt_tokens + request.sampling.max_tokens
    asked = f"a prompt of {request.prompt_tokens} tokens and {request.sampling.max_tokens} new ones"
    if most > limits.context:
        raise RequestError(f"{asked} exceed the model's context of {limits.context} tokens; ask for fewer")
    usable = pool.count - pool.watermark
    if -(-request.most_cached // executor.block_tokens) > usable:
        room = usable * executor.block_tokens
        raise RequestError(f"{asked} exceed the KV pool of {room} tokens; ask for fewer or make the pool larger")
    if min(request.tokens) < 0 or max(request.tokens) >= limits.vocabulary:
        raise RequestError(f"the prompt holds a token outside the vocabulary of {limits.vocabulary}")
    if source is None:
        return
    if not 0 < source.tokens < request.prompt_tokens:
        raise RequestError(
            f"a stored prefix of {source.tokens} tokens does not fit a prompt of {request.prompt_tokens}; "
            "at least one token has to be computed"
        )
    if request.sampling.prompt_logprobs:
        raise RequestError("the chances of a prompt whose first tokens are brought are not known; ask for no source")
