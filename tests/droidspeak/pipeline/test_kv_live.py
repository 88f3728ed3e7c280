"""Every schedule gives the logits of a partial prefill, bit by bit; a link that dies, those of a full one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dying_link import DyingLink
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.assets.models import load_model
from firsttoken.droidspeak.identity import identify
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.pipeline.kv_transfer import Buffers
from firsttoken.droidspeak.pipeline.live_loading import FirstToken, first_token
from firsttoken.droidspeak.pipeline.schedule import Schedule
from firsttoken.droidspeak.prefill import full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix, PrefixCache
from firsttoken.droidspeak.store import KVStore
from firsttoken.droidspeak.tensor_bytes import CachePiece
from firsttoken.link.shaped import Link
from firsttoken.study.errors import CacheError, LinkError, RequestError

DEPTH = 6
SENT = [Schedule.SEND_ALL, Schedule.SEND_REUSED, Schedule.PIPELINED]
GROUPS = [Group(0, 0), Group(0, 2), Group(2, 4), Group(3, DEPTH), Group(0, DEPTH)]
SUFFIX = torch.tensor([[5, 6, 7]])
ONE = Prefix.of([range(40, 60)])


@pytest.fixture(scope="module")
def receiver():
    return load_model("random:tiny-6", seed=1).model


@pytest.fixture(scope="module")
def sender():
    return load_model("random:tiny-6", seed=2).model


@pytest.fixture(scope="module")
def sent(sender) -> PrefixCache:
    return full_prefill(sender, ONE, edges=range(DEPTH))


def stored(sender, cache: PrefixCache, prefix: Prefix, folder: Path) -> Mapping[str, CachePiece]:
    store, identity = KVStore(folder, memory_bytes=0, disk_bytes=10_000_000), identify(sender, None, "the sender")
    store.store(prefix.ids[0].tolist(), identity, cache)
    return store.locate(prefix.ids[0].tolist(), identity)[0].spans


@pytest.fixture(scope="module")
def pieces(sender, sent: PrefixCache, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CachePiece]:
    return stored(sender, sent, ONE, tmp_path_factory.mktemp("sent"))


def expected(model, prefix: Prefix, sent: PrefixCache, group: Group, suffix: torch.Tensor) -> torch.Tensor:
    return suffix_logits(model, prefix, suffix, partial_prefill(model, prefix, sent, group), keep=1)[:, -1]


def from_tokens(model, prefix: Prefix, suffix: torch.Tensor) -> torch.Tensor:
    cache = partial_prefill(model, prefix, full_prefill(model, prefix), Group(0, 0))
    return suffix_logits(model, prefix, suffix, cache, keep=1)[:, -1]


def check_marks(result: FirstToken, group: Group, nbytes: int) -> None:
    marks = result.marks
    times = [marks.edge_s, marks.recompute_start_s, marks.recompute_end_s, marks.first_token_s]
    happened = [time for time in times if time is not None]
    assert happened == sorted(happened)
    assert (marks.edge_s is not None) == group.needs_e_cache
    assert (marks.recompute_end_s is not None) == (len(group) > 0)
    assert marks.bytes_moved == nbytes
    assert (marks.last_byte_s is not None) == (nbytes > 0)
    assert marks.last_byte_s is None or 0 < marks.last_byte_s <= marks.first_token_s


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("schedule", SENT)
def test_bit_equal_to_a_partial_prefill(receiver, sent, pieces, group: Group, schedule: Schedule) -> None:
    result = first_token(receiver, ONE, pieces, group, Link(), SUFFIX, schedule)
    assert torch.equal(result.logits, expected(receiver, ONE, sent, group, SUFFIX))
    own = from_tokens(receiver, ONE, SUFFIX)
    assert torch.equal(result.logits, own) == (group == Group(0, DEPTH))  # the sender's layers do show
    assert result.cache.get_seq_length() == ONE.tokens + SUFFIX.shape[1] and not result.fell_back
    kv = [layer for layer in range(DEPTH) if schedule is Schedule.SEND_ALL or layer not in group]
    moved = [f"layer.{layer}" for layer in kv] + [f"edge.{group.lo}"] * group.needs_e_cache
    check_marks(result, group, sum(pieces[name].nbytes for name in moved))


def test_recomputing_is_a_full_prefill_without_the_link(receiver) -> None:
    result = first_token(receiver, ONE, {}, Group(2, 4), DyingLink(0), SUFFIX, Schedule.RECOMPUTE)
    assert torch.equal(result.logits, from_tokens(receiver, ONE, SUFFIX)) and not result.fell_back
    check_marks(result, Group(0, DEPTH), 0)


def test_the_next_token_goes_on_from_the_cache(receiver, sent, pieces) -> None:
    result = first_token(receiver, ONE, pieces, Group(2, 4), Link(), SUFFIX)
    more = torch.tensor([[11]])
    longer = suffix_logits(receiver, ONE.followed_by(SUFFIX), more, result.cache)[:, -1]
    wanted = expected(receiver, ONE, sent, Group(2, 4), torch.cat([SUFFIX, more], 1))
    torch.testing.assert_close(longer, wanted, atol=1e-5, rtol=1e-4)


def test_buffers_serve_again(receiver, sender, sent, pieces, tmp_path: Path) -> None:
    other_prefix = Prefix.of([range(60, 80)])
    other = full_prefill(sender, other_prefix, edges=[2])
    buffers = Buffers(pieces.values())
    first = first_token(receiver, ONE, pieces, Group(2, 4), Link(), SUFFIX, buffers=buffers)
    kept = [layer.keys.clone() for layer in first.cache.layers]
    others = stored(sender, other, other_prefix, tmp_path)
    second = first_token(receiver, other_prefix, others, Group(2, 4), Link(), SUFFIX, buffers=buffers)
    assert torch.equal(second.logits, expected(receiver, other_prefix, other, Group(2, 4), SUFFIX))
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(first.cache.layers, kept, strict=True))


class HeldLink(Link):
    """Holds back what lies at ``held`` until the event; gives up, as a dead link would, when it never comes."""

    def __init__(self, held: Callable[[int], bool], until: threading.Event, patience_s: float) -> None:
        super().__init__()
        self.held, self.until, self.patience_s = held, until, patience_s

    def read_into(self, handle: int, buffer: memoryview, offset: int) -> None:
        if self.held(offset) and not self.until.wait(self.patience_s):
            raise LinkError("held back for ever")
        super().read_into(handle, buffer, offset)


def held_until_layer(model, layer: int, pass_tokens: int, held: Callable[[int], bool], schedule, pieces, patience_s=30):
    """The result over a link that holds bytes back until ``layer`` has run over ``pass_tokens`` tokens."""
    event = threading.Event()

    def ran(_, args, output):
        if args[0].shape[1] == pass_tokens:
            event.set()

    hook = model.model.layers[layer].register_forward_hook(ran)
    try:
        return first_token(model, ONE, pieces, Group(2, 4), HeldLink(held, event, patience_s), SUFFIX, schedule)
    finally:
        hook.remove()


def test_the_group_is_computed_before_any_kv_has_come(receiver, sent, pieces) -> None:
    edge = pieces["edge.2"]

    def kv(offset: int) -> bool:
        return not edge.offset <= offset < edge.offset + edge.nbytes

    result = held_until_layer(receiver, 3, ONE.tokens, kv, Schedule.PIPELINED, pieces)
    assert not result.fell_back
    assert result.marks.recompute_start_s < result.marks.last_byte_s
    assert torch.equal(result.logits, expected(receiver, ONE, sent, Group(2, 4), SUFFIX))
    unpipelined = held_until_layer(receiver, 3, ONE.tokens, kv, Schedule.SEND_REUSED, pieces, patience_s=0.05)
    assert unpipelined.fell_back == "layer.0 did not arrive: held back for ever"


def test_the_pass_behind_the_prefix_waits_for_one_layer_at_a_time(receiver, sent, pieces) -> None:
    for layer, before in [(1, 0), (4, 1), (4, 3), (5, 4)]:
        late = pieces[f"layer.{layer}"]
        result = held_until_layer(
            receiver, before, SUFFIX.shape[1], lambda at, o=late.offset: at == o, Schedule.PIPELINED, pieces
        )
        assert not result.fell_back
        assert torch.equal(result.logits, expected(receiver, ONE, sent, Group(2, 4), SUFFIX))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(schedule=st.sampled_from(SENT), group=st.sampled_from(GROUPS[:-1]), share=st.floats(0, 1, exclude_max=True))
def test_a_link_that_dies_leaves_the_answer_of_a_full_prefill(receiver, pieces, schedule, group, share) -> None:
    whole = first_token(receiver, ONE, pieces, group, Link(), SUFFIX, schedule).marks.bytes_moved
    dead_after = int(share * whole)
    result = first_token(receiver, ONE, pieces, group, DyingLink(dead_after), SUFFIX, schedule)
    assert torch.equal(result.logits, from_tokens(receiver, ONE, SUFFIX))
    assert f"the link died after {dead_after} bytes" in result.fell_back
    assert result.marks.bytes_moved <= dead_after and result.marks.edge_s is None
    own = full_prefill(receiver, ONE)
    assert all(
        torch.equal(layer.keys[:, :, : ONE.tokens], kv.keys)
        for layer, kv in zip(result.cache.layers, own.kv, strict=True)
    )
    assert all(thread.name != "kv-transfer" for thread in threading.enumerate())


class TestOutOfAStore:
    context = tuple(range(40, 90))
    shares = (*context[:32], 7, 8, 9)  # two blocks of 16, then something else

    @pytest.fixture
    def identity(self, sender):
        return identify(sender, None, "the sender")

    @pytest.fixture
    def store(self, sender, identity, tmp_path: Path) -> KVStore:
        store = KVStore(tmp_path / "store", memory_bytes=0, disk_bytes=10_000_000)
        store.store(self.context, identity, full_prefill(sender, Prefix.of([self.context]), edges=[2]))
        return store

    def test_the_stored_part_of_a_context_is_used(self, receiver, sender, identity, store: KVStore) -> None:
        file, tokens = store.locate(self.shares, identity, e_cache_layer=2)
        suffix = torch.tensor([self.shares[tokens:]])
        prefix = Prefix.of([self.shares[:tokens]])
        result = first_token(receiver, prefix, file.spans, Group(2, 4), Link(), suffix)
        assert tokens == 32 and not result.fell_back
        sent = full_prefill(sender, Prefix.of([self.context[:32]]), edges=[2])
        wanted = expected(receiver, prefix, sent, Group(2, 4), suffix)
        torch.testing.assert_close(result.logits, wanted, atol=1e-5, rtol=1e-4)


def test_pieces_that_are_not_there_are_named(receiver, pieces) -> None:
    with pytest.raises(RequestError, match=r"no edge.3, layer.0 was stored"):
        lacking = {name: piece for name, piece in pieces.items() if name not in ("edge.3", "layer.0")}
        first_token(receiver, ONE, lacking, Group(3, 5), Link(), SUFFIX)
    with pytest.raises(RequestError, match="does not fit 6 layers"):
        first_token(receiver, ONE, pieces, Group(3, 7), Link(), SUFFIX)


def test_pieces_of_another_shape_or_dtype_are_refused(receiver, pieces) -> None:
    with pytest.raises(CacheError, match=r"layer.0 is \[2, 1, \d+, 20, \d+\] .* belongs to another model or prefix"):
        first_token(receiver, Prefix.of([range(40, 61)]), pieces, Group(0, 0), Link(), SUFFIX)
    half = replace(pieces["edge.2"], dtype=torch.bfloat16)
    with pytest.raises(CacheError, match=r"edge.2 is .* of torch.bfloat16, LlamaForCausalLM computes"):
        first_token(receiver, ONE, pieces | {"edge.2": half}, Group(2, 4), Link(), SUFFIX)
