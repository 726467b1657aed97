"""The metrics, on cases worked out by hand from their published code."""

from __future__ import annotations

import pytest

from pypcd.evaluation.tasks.metrics import recall, word_match


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        ("1a-2b", True),
        ('"1a-2b"', True),
        ("The value is: '1a-2b'.", True),
        ('{"key": "1a-2b"}\n', True),
        ("wrong,1a-2b!right?", True),
        ("", False),
        ("1a-2b-3c", False),  # hyphens are kept: another identifier
        ("x1a-2b", False),
        ("1A-2B", False),
        ("1a - 2b", False),
        ("(1a-2b)", False),  # parentheses are not separators
        ("1a-2b</s>", False),
    ],
)
def test_retrieve_kv_looks_for_the_value_among_the_words(prediction: str, right: bool) -> None:
    assert word_match(prediction, "1a-2b") == right


@pytest.mark.parametrize(
    ("prediction", "share"),
    [
        ("ABCDE FGHIJ", 1.0),
        ("fghij, abcde", 1.0),  # any order, any case
        ("XABCDEX and more", 0.5),  # anywhere
        ("ABC DE", 0.0),
        ("", 0.0),
        ("ABC\x07DE FGHIJ", 0.5),  # a control character becomes a line break
        ("ABCDE ABCDE FGHIJ WRONG", 1.0),  # extra text costs nothing
    ],
)
def test_recall_is_the_share_of_references_in_the_prediction(prediction: str, share: float) -> None:
    assert recall(prediction, ["ABCDE", "FGHIJ"]) == share
    assert recall("12", ["12", "123"]) == 0.5 and recall("123", ["12", "123"]) == 1.0, "parts of each other"
