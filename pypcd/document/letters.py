"""What is known of letters: scripts without spaces, and how a sentence ends."""

from __future__ import annotations

import re

__all__ = ["ENDS", "WIDE", "paired"]

# characters of scripts without spaces between words: Thai to Burmese, Khmer, Chinese, Japanese
WIDE = r"\u0e00-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
ENDS = re.compile(r"[.!?…。．！？।॥۔؟]['\"”’»›」』)\]）]*\s*$")  # of a sentence

_HALF = re.compile(r"[\ud800-\udfff]")


def paired(text: str) -> str:
    """A text that UTF-8 can hold: halves of a character are put together, and a lone one is U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _HALF.search(text) else text
