"""Another model's cache at a replica whose layers come while a neighbour lends the others: tiny random weights, fp32.

With chunks, preemption and clients that leave ``test_schedules_of_everything.py`` tries it.
"""

from __future__ import annotations

import copy

import pytest
import torch
from borrowing import until
from plain_tokens import Plain, check_greedy
from senders import STORED, Senders
from swarms import DEPTH, Asked

from firsttoken.cps.policies import make_policy
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.request import Sampling
from firsttoken.study.errors import RequestError
from firsttoken_extras.layer_borrowing.prefix_offer import group_at

CONFIG = EngineConfig(scheduler="sarathi", requests=6, token_budget=9, watermark=0.0)
TOKENS, POOL = 12, {"block_tokens": 4, "host_blocks": 100}
GROUPS = (Group(0, 0), Group(2, 4), Group(3, 6), Group(5, 6), Group(0, 3))


@pytest.fixture(scope="module")
def known(asked) -> list[Asked]:
    return [asked(length, TOKENS) for length in range(17, 29)]


@pytest.fixture(scope="module")
def senders(lent, known, tmp_path_factory) -> Senders:
    """A twin of the model, whose cache is exact, and a stranger, whose cache is not."""
    stranger = copy.deepcopy(lent)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in stranger.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    models = {"twin": copy.deepcopy(lent), "stranger": stranger}
    return Senders(lent, models, tmp_path_factory.mktemp("senders") / "store", [one.prompt for one in known])


def reference(lent, senders: Senders, one: Asked, group: Group) -> Plain:
    """What partial prefill says after the stranger's cache, by transformers alone."""
    prefix = Prefix.of([one.prompt[:STORED]])
    sent = full_prefill(senders.models["stranger"], prefix, senders.edges)
    said: list[int] = []
    logits = []
    for _ in range(TOKENS):
        cache = partial_prefill(lent, prefix, sent, group)
        rest = torch.tensor([[*one.prompt[STORED:], *said]])
        logits.append(suffix_logits(lent, prefix, rest, cache, keep=1)[0, -1])
        said.append(int(logits[-1].argmax()))
    return Plain(said, torch.stack(logits).float())


@pytest.mark.parametrize("here", [1, 3, 4, DEPTH])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_strangers_cache_at_a_replica_that_lacks_layers(replica, lent, senders, known, here, group):
    """It says what partial prefill of the group that ends with the model says, while layers come in the middle of it;
    and where all are here, what that of the pair's own group says."""
    one, taken = known[4], group_at(group, senders.edges, here, DEPTH)
    wanted = reference(lent, senders, one, taken) if len(taken) < DEPTH else one.plain
    made = replica(config=CONFIG, policy=make_policy("recompute"), **POOL)
    made.arrivals.come(1 + here)
    made.step()  # takes over what is here
    request = made.submit(one.prompt, Sampling(TOKENS), offer=senders.offer(one.prompt, group, "stranger"))
    until(request, 2, made)
    if here < DEPTH:
        made.arrivals.come(DEPTH - here)
    made.run()
    assert bool(request.fell_back) == (len(taken) == DEPTH)
    assert check_greedy(request.output, wanted) == TOKENS


@pytest.mark.parametrize(
    ("group", "edges", "here", "wanted"),
    [
        (Group(2, 4), (1, 2, 3, 4, 5), 3, Group(2, 6)),
        (Group(2, 4), (1, 2, 3, 4, 5), 1, Group(1, 6)),
        (Group(4, 5), (2,), 3, Group(2, 6)),
        (Group(4, 5), (4,), 3, Group(0, 6)),
        (Group(0, 0), (1, 3), 3, Group(3, 6)),
        (Group(0, 3), (1, 2), 3, Group(0, 6)),
        (Group(2, 4), (1, 2), 0, Group(0, 6)),
        (Group(2, 4), (1, 2), 6, Group(2, 4)),
    ],
)
def test_the_group_ends_with_the_model_while_layers_are_lacking(group, edges, here, wanted):
    assert group_at(group, edges, here, DEPTH) == wanted


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(RequestError, match=r"group \[2, 9\) does not fit 6 layers"):
        group_at(Group(2, 9), (), 0, DEPTH)


def test_an_offer_that_cannot_be_taken_says_why(replica, senders, known):
    """With no layer here there is nothing below a group; a store that has dropped the prefix says so."""
    one = known[0]
    made = replica(config=CONFIG, policy=make_policy("swap"), **POOL)
    made.arrivals.come()
    request = made.submit(one.prompt, Sampling(TOKENS), offer=senders.offer(one.prompt, Group(2, 4), "twin"))
    assert request.fell_back == "no hidden states are kept at or below layer 0"
    made.arrivals.come(DEPTH)
    made.run()
    other = [255, *one.prompt[1:]]
    late = made.submit(other, Sampling(2), offer=senders.offer(other, Group(2, 4), "twin"))
    assert "no stored context" in late.fell_back, late.fell_back
    made.run()
    assert check_greedy(request.output, one.plain) == TOKENS and len(late.output) == 2
