"""Prefixes by blocks: the index finds what comparing every entry finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.droidspeak.prefix_index import Hit, PrefixIndex, token_bytes

contexts = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
entries = st.tuples(st.sampled_from("AB"), contexts)


def shared(stored: tuple[int, ...], context: tuple[int, ...], block: int) -> int:
    """Tokens that the two have in common, as far as whole blocks go or both end."""
    if stored == context:
        return len(context)
    common = next((i for i, (a, b) in enumerate(zip(stored, context, strict=False)) if a != b), None)
    common = min(len(stored), len(context)) if common is None else common
    return common // block * block


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), entries), max_size=12), entries, st.integers(1, 5))
def test_the_longest_shared_prefix_is_found_and_the_newest_of_several(changes, asked, block):
    index, there = PrefixIndex(block), []
    for coming, entry in changes:
        if coming and entry not in there:
            there.append(entry)
            index.add(repr(entry), entry[0], token_bytes(entry[1]))
        elif not coming and entry in there:
            there.remove(entry)
            index.remove(repr(entry), entry[0], token_bytes(entry[1]))
    model, context = asked
    lengths = [shared(stored, context, block) if owner == model else 0 for owner, stored in there]
    found = index.longest(model, token_bytes(context))
    if not max(lengths, default=0):
        assert found is None
    else:
        newest = max(i for i, length in enumerate(lengths) if length == max(lengths))
        assert found == Hit(repr(there[newest]), max(lengths))


def test_only_what_is_wanted_is_found():
    index = PrefixIndex(2)
    index.add("short", "A", token_bytes([1, 2]))
    index.add("long", "A", token_bytes([1, 2, 3, 4]))
    assert index.longest("A", token_bytes([1, 2, 3, 4]), lambda key: key == "short") == Hit("short", 2)
    assert index.longest("A", token_bytes([1, 2, 3, 4]), lambda key: False) is None
