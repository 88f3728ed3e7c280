"""Scores that agree with the official scripts and packages, case by case, and what must hold for any text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firsttoken.scoring import edit_similarity, exact_match, rouge_l, token_f1

# Worked out by hand from the rules of evaluate-v1.1.py and evaluate-v2.0.py; the two agree on all of these.
GOLDEN = {
    "equal": ("Paris", ["Paris"], 1, 1),
    "case": ("PARIS", ["paris"], 1, 1),
    "leading article": ("The cat", ["cat"], 1, 1),
    "articles inside": ("a cat and an old hat", ["cat and old hat"], 1, 1),
    "an article is a whole word": ("theatre", ["atre"], 0, 0),
    "a letter that is an article": ("vitamin A", ["vitamin"], 1, 1),
    "an accented letter is no article": ("à la carte", ["la carte"], 0, 0.8),
    "full stops": ("U.S.", ["us"], 1, 1),
    "apostrophe": ("don't", ["dont"], 1, 1),
    "a hyphen joins": ("well-known", ["wellknown"], 1, 1),
    "a hyphen does not part": ("well-known", ["well known"], 0, 0),
    "punctuation goes before articles": ("an-other", ["other"], 0, 0),
    "currency": ("$1,000", ["1000"], 1, 1),
    "typographic quotes stay": ("\u2018cat\u2019", ["cat"], 0, 0),
    "a typographic apostrophe stays": ("don\u2019t", ["don't"], 0, 0),
    "typographic equals itself": ("\u201cCat\u201d", ["\u201ccat\u201d"], 1, 1),
    "an en dash stays": ("1914\u20131918", ["1914-1918"], 0, 0),
    "accents in either case": ("ÉCOLE", ["école"], 1, 1),
    "lower case is no case folding": ("STRASSE", ["straße"], 0, 0),
    "no-break space": ("New\u00a0York", ["New York"], 1, 1),
    "other scripts": ("東京 Tokyo", ["東京"], 0, 2 / 3),
    "white space": ("  New \n\t York ", ["New York"], 1, 1),
    "word order": ("York New", ["New York"], 0, 1),
    "half of it": ("red car", ["red bus"], 0, 0.5),
    "repeated in the prediction": ("be be be", ["be"], 0, 0.5),
    "repeated in the answer": ("be", ["be be be"], 0, 0.5),
    "repeated in both": ("to be or not to be", ["to be to be"], 0, 0.8),
    "best of several": ("red car", ["blue bus", "the red car!", "red"], 1, 1),
    "best f1 of several": ("big red car", ["red", "red car"], 0, 0.8),
    "the scores choose apart": ("cat", ["cat", "cat cat"], 1, 1),
    "nothing said": ("", ["cat"], 0, 0),
    "nothing but an article": ("the", ["cat"], 0, 0),
    "nothing to say": ("cat", [], 0, 0),
}

# What rouge-score 0.1.2 says (rougeL, no stemmer, F-measure) where words begin and end; the rest is the property below.
ROUGE = {
    "a hyphen parts": ("well-known", ["well known"], 1),
    "an underscore parts": ("x_1", ["x 1"], 1),
    "full stops and commas part": ("U.S. 1,000", ["us 1000"], 0),
    "an accented letter parts": ("naïve café", ["naive cafe"], 0),
    "an accented letter is no word": ("état", ["tat"], 1),
    "other scripts have no words": ("東京", ["東京"], 0),
    "best of several": ("red car", ["blue bus", "a red car"], 4 / 5),
    "nothing said": ("", ["a"], 0),
    "nothing for nothing": ("...", [""], 0),
    "no answers": ("a", [], 0),
}

# What rapidfuzz's fuzz.ratio / 100 says, worked out by hand: twice the common subsequence over both lengths.
EDIT = {
    "best of several": ("abc", ["x", "abd"], 4 / 6),
    "nothing said": ("", ["abc"], 0),
    "nothing for nothing": ("", [], 1),
}

words = st.lists(st.sampled_from(["a", "the", "cat", "Cat", "hat", "hat.", "\u2019", "é", "", " "]), max_size=6)
texts = st.one_of(st.text(max_size=20), words.map(" ".join))


@pytest.mark.parametrize(("prediction", "answers", "em", "f1"), GOLDEN.values(), ids=GOLDEN)
def test_golden_cases(prediction: str, answers: list[str], em: float, f1: float) -> None:
    assert exact_match(prediction, answers) == em
    assert token_f1(prediction, answers) == pytest.approx(f1)


@pytest.mark.parametrize(("prediction", "answers"), [("", []), ("", [""]), ("The!", [""]), ("", ["a", "cat"])])
def test_nothing_for_nothing_is_right_as_in_version_2(prediction: str, answers: list[str]) -> None:
    assert exact_match(prediction, answers) == token_f1(prediction, answers) == 1.0


@pytest.mark.parametrize(("prediction", "answers", "score"), ROUGE.values(), ids=ROUGE)
def test_rouge_l(prediction: str, answers: list[str], score: float) -> None:
    assert rouge_l(prediction, answers) == pytest.approx(score)


@pytest.mark.parametrize(("prediction", "answers", "score"), EDIT.values(), ids=EDIT)
def test_edit_similarity(prediction: str, answers: list[str], score: float) -> None:
    assert edit_similarity(prediction, answers) == pytest.approx(score)


@given(texts, st.lists(texts, max_size=3))
@settings(max_examples=200, deadline=None)
def test_scores_are_ordered_and_an_exact_match_has_full_f1(prediction: str, answers: list[str]) -> None:
    em, f1 = exact_match(prediction, answers), token_f1(prediction, answers)
    assert 0 <= em <= f1 <= 1
    assert em in (0.0, 1.0)
    assert f1 == 1.0 or em == 0.0
    assert (em, f1) == (exact_match(prediction, iter(answers)), token_f1(prediction, iter(answers)))


@given(texts, texts)
@settings(max_examples=200, deadline=None)
def test_either_text_may_be_the_answer(one: str, other: str) -> None:
    assert token_f1(one, [other]) == token_f1(other, [one])
    assert rouge_l(one, [other]) == rouge_l(other, [one])
    assert edit_similarity(one, [other]) == edit_similarity(other, [one])
    assert exact_match(one, [other]) == exact_match(other, [one])


@given(texts, st.lists(texts, min_size=1, max_size=3), texts)
@settings(max_examples=100, deadline=None)
def test_another_accepted_answer_never_hurts(prediction: str, answers: list[str], more: str) -> None:
    assert exact_match(prediction, [*answers, more]) >= exact_match(prediction, answers)
    for score in (token_f1, rouge_l, edit_similarity):
        assert 0 <= score(prediction, answers) <= score(prediction, [*answers, more]) <= 1
    assert exact_match(more, [*answers, more]) == 1.0


@given(texts, texts)
@settings(max_examples=200, deadline=None)
def test_similarities_are_those_of_the_longest_common_subsequence(one: str, other: str) -> None:
    assert edit_similarity(one, [other]) == pytest.approx(_similarity(one, other) if one or other else 1.0)
    first, second = (re.findall("[a-z0-9]+", text.lower()) for text in (one, other))
    assert rouge_l(one, [other]) == pytest.approx(_similarity(first, second) if first and second else 0.0)


def _similarity(one: Sequence[str], other: Sequence[str]) -> float:
    """Twice the longest common subsequence over both lengths, by the textbook's table."""
    best = [0] * (len(other) + 1)
    for symbol in one:
        last = list(best)
        for i, candidate in enumerate(other):
            best[i + 1] = last[i] + 1 if symbol == candidate else max(last[i + 1], best[i])
    return 2 * best[-1] / (len(one) + len(other))
