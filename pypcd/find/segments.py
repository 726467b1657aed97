"""The pieces of a text: what is found for a question and repeated before it."""

from __future__ import annotations

import collections
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import sentencex  # type: ignore[import-untyped]

from pypcd.document.letters import ENDS, WIDE

__all__ = ["pieces"]

LONGEST = 1200  # characters of a piece: some 250 tokens of English
JOINED = 600  # of one that is put together from sentences or lines
HEADING = 100  # of the longest heading

# ideographs, kana and Korean: each says about as much as three letters
DENSE = re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")
FIRST_WORD = re.compile(rf"^\s*([{WIDE}]|[^\s{WIDE}]*)")
PARAGRAPH = re.compile(r".*?(?:\n[^\S\n]*\n\s*|\Z)", re.DOTALL)  # with the blank lines behind it
HEAD = re.compile(r"\s*(?:(\d)|([^\w\s]))")
SEEN = re.compile(r"\S")
DOUBTFUL = re.compile(r"(?<!\w)\w{1,2}\.\s*$")  # "z. B. ", "3. Oktober": an abbreviation or an ordinal number
UNSEEN = re.compile(r"[\s\ud800-\udfff]")  # sentencex stops the program at some white space that is not ASCII
QUOTES = re.compile(r"[\"'“”„‘’«»‹›「」『』()\[\]{}（）【】《》]")
SEPARATORS = (re.compile(r"\t"), re.compile(r"\|"), re.compile(";"), re.compile(r"(?<=\S) {2,}(?=\S)"), re.compile(","))
# where a long text may be cut, best first
CUTS = re.compile(r"[;；)\]}>]+,?\s*|\n"), re.compile(r"[,，、:：|]\s*|\s+")


def pieces(text: str) -> tuple[str, ...]:
    """A text's pieces, one behind the other: joined, they are the text.

    A piece is a paragraph with its heading. Of a paragraph that has more than LONGEST characters it is a record (an item of a list, a
    line of a table) or sentences and lines with their neighbours. White space belongs to the piece before it, so each begins with another
    character, but for the first.
    """
    parts = itertools.chain.from_iterable(_cut(*pair) for pair in _with_headings(PARAGRAPH.findall(text)))
    found, begin, end = list[str](), 0, 0
    for border in itertools.accumulate(map(len, parts)):
        if border > end:
            seen = SEEN.search(text, border)
            end = seen.start() if seen else len(text)
            if not text[begin:end].isspace():
                found.append(text[begin:end])
                begin = end
    return tuple(found) if found or not text else (text,)


def _size(text: str) -> int:
    """About as many letters as have its number of tokens."""
    return len(text) if text.isascii() else len(text) + 2 * len(DENSE.findall(text))


def _with_headings(paragraphs: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each paragraph with the heading before it. More than three short lines are no headings, but a list."""
    lines = list[str]()
    for paragraph in paragraphs:
        if _is_heading(paragraph):
            lines.append(paragraph)
            continue
        if len(lines) > 3:
            yield from (("", line) for line in lines)
            lines = []
        yield "".join(lines), paragraph
        lines = []
    yield from (("", line) for line in lines)


def _is_heading(paragraph: str) -> bool:
    line = paragraph.strip()
    is_sentence = ENDS.search(line) or re.match(r"[-*+•|]\s", line)
    return "\n" not in line and _size(line) <= HEADING and (line.startswith("#") or not is_sentence)


def _cut(heading: str, paragraph: str) -> list[str]:
    if _size(paragraph) <= LONGEST or paragraph.isspace():
        return [heading + paragraph]
    lines = re.findall(r"[^\n]*\n|[^\n]+", paragraph)
    parts = [part for record in _records(lines) for part in _joined(_sentences(record))]
    parts = parts or _joined([part for unit in _units(lines) for part in _sentences(unit)])
    return [heading + parts[0], *parts[1:]]


def _records(lines: Sequence[str]) -> list[str]:
    """The records of a list, a table or data: lines with the least indentation by which records are short enough, each with those below
    that have more. None if most of them neither begin alike nor have the same separators."""
    indents = [len(line) - len(line.lstrip()) for line in lines]
    fewest = max(3, sum(map(len, lines)) / LONGEST)
    at_most = itertools.accumulate(n for _, n in sorted(collections.Counter(indents).items()))
    least = next((indent for indent, n in zip(sorted(set(indents)), at_most) if n >= fewest), -1)
    is_first = [indent <= least and line.strip(" \t\r\n])},;") != "" for line, indent in zip(lines, indents)]
    first = [line for line, is_one in zip(lines, is_first) if is_one]
    heads = (HEAD.match(line) for line in first)
    counts = collections.Counter(head and (head[2] or "0") for head in heads)
    head, n = counts.most_common(1)[0] if counts else (None, 0)
    if not (head and 2 * n > len(first)) and not _is_table(first):
        return []
    return _grouped(lines, is_first)


def _grouped(parts: Sequence[str], is_first: Iterable[bool]) -> list[str]:
    """Parts with those behind them, up to the next one that is the first of a group."""
    found = list[list[str]]()
    for part, is_one in zip(parts, is_first):
        if is_one or not found:
            found.append([])
        found[-1].append(part)
    return ["".join(some) for some in found]


def _is_table(lines: Sequence[str]) -> bool:
    """Whether most lines have the same number of some separator; of commas at least two, as sentences have one."""
    for separator in SEPARATORS:
        counts = collections.Counter(len(separator.findall(line)) for line in lines)
        for number, n in counts.most_common(1):
            if number >= (2 if separator is SEPARATORS[-1] else 1) and n > 0.8 * len(lines):
                return True
    return False


def _units(lines: Sequence[str]) -> list[str]:
    """Lines, but a text that was wrapped to a width in one: there the next line's first word did not fit."""
    lengths = [len(line.rstrip()) for line in lines]
    width = sorted(lengths)[len(lines) * 9 // 10]  # some lines are wider, such as those with an address
    words = (FIRST_WORD.findall(line)[0] for line in lines[1:])
    return _grouped(lines, [True, *(length + 1 + len(word) <= width for length, word in zip(lengths, words))])


def _sentences(unit: str) -> list[str]:
    """A unit in parts of at most LONGEST characters: itself, its sentences, or slices of them."""
    if _size(unit) <= LONGEST:
        return [unit]
    found = list[str]()
    for one in _segmented(unit, UNSEEN.sub(" ", unit)):
        if _size(one) <= LONGEST:
            found.append(one)
            continue
        # all between quotation marks or brackets counts as one sentence, also if the pair is none or far apart
        for part in _segmented(one, QUOTES.sub(" ", UNSEEN.sub(" ", one))):
            found += [part] if _size(part) <= LONGEST else _slices(part)
    return found


def _segmented(text: str, seen: str) -> Iterator[str]:
    """The sentences of a text, by those of another one of its length."""
    begin = end = 0
    for sentence in sentencex.segment("en", seen):  # terminators of any script; abbreviations of English
        end += len(sentence)
        if not DOUBTFUL.search(sentence[-8:]) or end - begin > JOINED:
            yield text[begin:end]
            begin = end
    if begin < len(text):
        yield text[begin:]


def _slices(text: str) -> Iterator[str]:
    """A text in about equal slices of at most JOINED characters, cut behind a separator if there is one in their second half."""
    begin, left = 0, _size(text)
    while begin < len(text):
        most = -(-left // -(-left // JOINED))
        window = text[begin : begin + most]
        while (size := _size(window)) > most:
            window = window[: len(window) * most // size]
        half, end = len(window) // 2, len(window)
        if begin + end < len(text):
            ends = (max((found.end() for found in cut.finditer(window, half)), default=0) for cut in CUTS)
            end = next(filter(None, ends), 0) or end
            while end > half + 1 and unicodedata.category(text[begin + end])[0] == "M":  # a mark on the letter before
                end -= 1
        yield text[begin : begin + end]
        begin, left = begin + end, left - _size(text[begin : begin + end])


def _joined(parts: Sequence[str]) -> list[str]:
    """Parts with their neighbours, about equally long and about JOINED characters."""
    sizes = [_size(part) for part in parts]
    aim = sum(sizes) / -(-sum(sizes) // JOINED)
    is_first, length = list[bool](), 0.0
    for size in sizes:
        is_first.append(length + size / 2 > aim)
        length = size if is_first[-1] else length + size
    return _grouped(parts, is_first)
