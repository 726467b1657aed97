"""Which tokens of a prompt the twin sees, and where an answer stands among them."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from pypcd.decode.vocabulary import SKIPPED
from pypcd.settings.config import PCDConfig

__all__ = ["Mark", "Reading", "Written", "between", "excerpt", "find", "last_of", "marks", "named", "seen"]

_MOST_WORDS = 12  # of an answer are looked for
_SKIPPED = SKIPPED.decode() + "\n\t"


@dataclasses.dataclass(frozen=True)
class Written:
    """An answer as far as it was written.

    Attributes:
        text: the answer.
        start: its first character that the other answer does not share.
        is_ended: whether it goes no further.
    """

    text: str
    start: int
    is_ended: bool

    @property
    def line(self) -> str:
        """The rest of a line that follows what both answers share, without the quotes and colons that come first; "…" if it goes on."""
        line, newline, more = self.text[self.start :].lstrip(_SKIPPED).partition("\n")
        goes_on = more or not (newline or self.is_ended)
        return (line.rstrip() + " …" * bool(goes_on)) or "(nothing)"

    def is_right(self, gold: str) -> bool | None:
        """Whether a right answer is in it; None: neither the answer nor its line has ended, or no right answer is known."""
        if not gold:
            return None
        if gold in self.text:
            return True
        return False if self.is_ended or "\n" in self.text[self.start :].lstrip(_SKIPPED) else None


@dataclasses.dataclass(frozen=True)
class Mark:
    """An answer, and where it stands in the prompt.

    Attributes:
        writer: who writes it, "plain" or "PCD"; None for a right answer that neither writes.
        is_right: whether it is the right answer.
        text: the answer.
        spans: the tokens of each place where it stands, in order.
        around: the text around the last of them.
    """

    writer: str | None
    is_right: bool
    text: str
    spans: tuple[range, ...] = ()
    around: str = ""


@dataclasses.dataclass(frozen=True)
class Reading:
    """What is read before a token is chosen: the prompt, and what was written after it.

    Attributes:
        n_tokens: the number of tokens.
        seen: the tokens that the twin of the last one sees.
        text: their text.
        marks: at most two answers; the first is the right one, if that is known.
    """

    n_tokens: int
    seen: tuple[range, ...]
    text: str
    marks: tuple[Mark, ...] = ()


def seen(n_tokens: int, setting: PCDConfig) -> tuple[range, ...]:
    """The positions that the twin of the last of n tokens sees, as ranges that do not touch.

    It attends to no others, in any layer. The keys and values of those that it sees were made with all of the text before them.
    """
    first = 0 if setting.window is None else max(n_tokens - setting.window, 0)
    n_sink = min(setting.n_sink, n_tokens)
    if first <= n_sink:
        return (range(n_tokens),)
    return (range(n_sink), range(first, n_tokens)) if n_sink else (range(first, n_tokens),)


def between(spans: Sequence[range], n: int) -> list[range]:
    """The stretches of n positions that are in none of the spans."""
    found, end = [], 0
    for span in sorted([*spans, range(n, n)], key=lambda span: span.start):
        if span.start > end:
            found.append(range(end, span.start))
        end = max(end, span.stop)
    return found


def find(pieces: Sequence[bytes], text: str) -> tuple[range, ...]:
    """The tokens of each place where a text stands, but not as a part of a longer word or number.

    Args:
        pieces: the tokens' texts; control tokens have none.
    """
    joined = _joined(pieces)
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = []
    for start, stop in _places(joined, text):
        first, last = (len(_encoded(joined[:i])) for i in (start, stop))
        spans.append(range(bisect.bisect_right(ends, first), bisect.bisect_left(ends, last) + 1))
    return tuple(spans)


def named(pieces: Sequence[bytes], answer: str, start: int = 0) -> str:
    """The longest beginning of an answer's line, in whole words, that stands in the prompt; "" if none does.

    Args:
        pieces: the prompt's tokens.
        start: it begins with the word that this character of the answer belongs to, or with the next one.
    """
    words = [m.span() for m in re.finditer(r"\w+", answer) if m.end() > start][:_MOST_WORDS]
    joined = _joined(pieces)
    for _, stop in reversed(words):
        part = answer[words[0][0] : stop]
        if "\n" not in part and next(_places(joined, part), None):
            return part
    return ""


def marks(pieces: Sequence[bytes], plain: Written, pcd: Written, gold: str, n_characters: int = 56) -> tuple[Mark, ...]:
    """The right answer and what is written in its place; without a right answer ("") what PCD and plain decoding write.

    An answer that does not stand in the prompt is left out, but for the right one.

    Args:
        pieces: the prompt's tokens.
        n_characters: at most so many of the text around an answer.
    """

    def mark(writer: str | None, text: str, is_right: bool) -> Mark:
        spans = find(pieces, text)
        return Mark(writer, is_right, text, spans, excerpt(pieces, spans[-1], n_characters) if spans else "")

    answers = {"PCD": pcd, "plain": plain}
    right = [writer for writer, answer in answers.items() if answer.is_right(gold)]
    made = [mark(right[0] if right else None, gold, True)] if gold else []
    others = [writer for writer in answers if writer not in right]
    for writer in others[-1:] if gold else others:
        if part := named(pieces, answers[writer].text, answers[writer].start):
            made.append(mark(writer, part, False))
    return tuple(made)


def excerpt(pieces: Sequence[bytes], span: range, n_characters: int) -> str:
    """The line around some tokens, in at most so many characters if they leave room; "…" stands for what is left out."""
    before, part, after = (
        b"".join(some).decode("utf-8", "ignore")
        for some in (pieces[: span.start], pieces[span.start : span.stop], pieces[span.stop :])
    )
    before, after = before.rpartition("\n")[2].lstrip(), after.partition("\n")[0].rstrip()
    room = max(n_characters - len(part), 2)
    n_after = min(len(after), max(room // 4, room - len(before)))
    return last_of(before, room - n_after) + part + (after if len(after) <= n_after else after[: n_after - 1] + "…")


def last_of(text: str, n: int) -> str:
    """The last of a text, from the beginning of a word on if one is near, in at most so many characters with its "…"."""
    if len(text) <= n:
        return text
    kept = text[len(text) - n + 1 :]
    word = kept.find(" ") + 1
    return "…" + kept[word if word < n // 3 else 0 :]


def _joined(pieces: Sequence[bytes]) -> str:
    return b"".join(pieces).decode("utf-8", "surrogateescape")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _places(joined: str, text: str) -> Iterator[tuple[int, int]]:
    at = joined.find(text)
    while at >= 0:
        stop = at + len(text)
        if not (_are_one_word(joined[at - 1 : at + 1]) or _are_one_word(joined[stop - 1 : stop + 1])):
            yield at, stop
        at = joined.find(text, stop)


def _are_one_word(pair: str) -> bool:
    """Whether two characters are letters or digits; scripts without capitals do not count, since some do not part words."""
    return len(pair) == 2 and all(c.isdigit() or c.lower() != c.upper() for c in pair)
