"""Draft and verify: a stage of a growing model drafts, and one prefill of the whole model keeps the longest prefix that
it would have said (the acceptance of Leviathan et al., ICML 2023, across a start).

A stage's tokens are drafts of a request that asks for it. They stand behind its final tokens, the whole model computes
all of them again, and the first that it would not have said is replaced, with what follows taken back.
"""

from __future__ import annotations

from firsttoken.engine.request import Request, ScheduledChunk

MOST_WEIGHED = 64  # drafts whose shares are remembered: 12.6 MB of a request, with a vocabulary of 49,152


def take_draft(request: Request, token: int) -> bool:
    """Append ``token`` to the tokens of ``request`` as a draft; return False where it is none, and no more will be.

    The last token is none, be it by its number or one that ends the answer: that the whole model says itself.
    """
    count, sampling = request.draft_count, request.sampling
    full = count >= sampling.max_tokens - 1 or (bool(request.draft_shares) and count >= MOST_WEIGHED)
    taken = not full and token not in sampling.stop
    if taken:
        request.tokens.append(token)
        request.draft_count += 1
    del request.draft_shares[request.draft_count :]
    return taken


def settle(chunk: ScheduledChunk, token: int, now_s: float) -> tuple[list[int], int | None]:
    """Return the drafts that are final now that the whole model has computed ``chunk``, and the token that follows what
    is final if there is one: the step's ``token``, or the whole model's own in the place of a draft.

    What follows such a draft is taken back. The blocks of that take what is said next.
    """
    request, tokens = chunk.request, chunk.request.tokens
    following = token if chunk.completes else None
    if not request.draft_count:
        return [], following
    end = min(chunk.end + 1, len(tokens)) if request.correction is None else request.correction[0]
    final = tokens[len(tokens) - request.draft_count : end]
    request.times_s += [now_s] * len(final)
    request.draft_count -= len(final)
    del request.draft_shares[: len(final)]
    if request.correction is not None:
        following = request.correction[1]
        del tokens[end:]
        request.cached = request.computed = end
        request.draft_count, request.correction = 0, None
        request.draft_shares.clear()
    return final, following
