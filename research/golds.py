"""Public questions with the places in their texts that answer them, for research.finding."""

from __future__ import annotations

import bz2
import itertools
import json
import pathlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pypcd.evaluation.tasks import public
from pypcd.evaluation.tasks.public import KEYS, PUBLIC

__all__ = [
    "Asked",
    "Span",
    "Text",
    "counts",
    "hotpot",
    "paragraphs",
    "records",
    "subjects",
    "told",
    "unanswered",
    "xquad",
]

Span = tuple[int, int]  # characters of a text: the first, and the one past the last
NO_ANSWER = "not in the text"
HALVES = json.loads((PUBLIC / "halves.json").read_text(encoding="utf-8"))


class Asked(NamedTuple):
    """A question about a text, the paragraphs that answer it, and what must be read of them. An answer of several lines names several
    things, which count alike."""

    id: str
    question: str
    answer: str
    paragraphs: list[Span]
    needed: list[Span]

    def found(self, passages: Sequence[Span]) -> dict[str, bool]:
        """Whether each of the paragraphs is touched by a passage, and whether all that must be read is in passages."""
        touched = all(any(b < end and begin < e for b, e in passages) for begin, end in self.paragraphs)
        needed = (i for span in self.needed for i in range(*span))
        return {"paragraph": touched, "answer": all(any(b <= i < e for b, e in passages) for i in needed)}


Text = tuple[str, list[Asked]]


def xquad(
    half: str, n: int, n_paragraphs: int, reworded: bool = False, file: str = "", filler: Sequence[str] = ()
) -> Iterator[Text]:
    """Texts of so many paragraphs of a half of XQuAD, and n questions, each on one of them; in one mixed order.

    Args:
        file: XQuAD in another language; its paragraphs and questions have the order of the English ones.
        filler: paragraphs that stand among those of each text.
    """
    data = pathlib.Path(file).read_bytes() if file else bz2.decompress((PUBLIC / "xquad.en.json.bz2").read_bytes())
    articles = json.loads(data)["data"]
    paragraphs = [p for article in articles if article["title"] in HALVES["xquad"][half] for p in article["paragraphs"]]
    random.Random("finding").shuffle(paragraphs)
    words = {qa["id"]: qa["question"].strip() for p in paragraphs for qa in p["qas"]}
    if reworded:
        other = public.reworded()
        words = {key: other[key] for key in words if key in other}
    chosen = random.Random("finding").sample(list(words), min(n, len(words)))
    for at in range(0, len(paragraphs), n_paragraphs):
        own = paragraphs[at : at + n_paragraphs]
        parts = [*(p["context"] for p in (own + paragraphs[:at])[:n_paragraphs]), *filler]
        order = random.Random("filler").sample(range(len(parts)), len(parts)) if filler else range(len(parts))
        text, placed = _joined([parts[i] for i in order])
        places = [span for _, span in sorted(zip(order, placed))]
        asked = []
        for span, qa in ((span, qa) for span, p in zip(places, own) for qa in p["qas"] if qa["id"] in chosen):
            answer, begin = qa["answers"][0]["text"], span[0] + qa["answers"][0]["answer_start"]
            asked.append(Asked(qa["id"], words[qa["id"]], answer, [span], [(begin, begin + len(answer))]))
        yield text, asked


def hotpot(file: str, half: str, n: int, n_paragraphs: int = 0) -> Iterator[Text]:
    """HotpotQA: two paragraphs are needed, which stand among others, at least n_paragraphs in all. Questions with an even number are the
    first half."""
    rows = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))[half == "second" :: 2]
    for i, row in enumerate(rows[:n]):
        parts = [(row["title_a"], row["para_a"]), (row["title_b"], row["para_b"]), *(d[:2] for d in row["distractors"])]
        others = [tuple(d[:2]) for other in [*rows[i + 1 :], *rows[:i]] for d in other["distractors"]]
        parts += others[: max(n_paragraphs - len(parts), 0)]
        order = random.Random(row["_id"]).sample(range(len(parts)), len(parts))
        text, places = _joined([f"{parts[i][0]}\n{''.join(parts[i][1])}" for i in order])
        both = [places[order.index(k)] for k in (0, 1)]
        yield text, [Asked(row["_id"], row["question"], row["answer"], both, both)]


def paragraphs(file: str) -> list[str]:
    """Those of HotpotQA, each once."""
    rows = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
    pairs = [
        pair for r in rows for pair in [(r["title_a"], r["para_a"]), (r["title_b"], r["para_b"]), *r["distractors"]]
    ]
    return list(dict.fromkeys(f"{pair[0]}\n{''.join(pair[1])}" for pair in pairs))


def records(half: str, n: int) -> Iterator[Text]:
    """The key-value records of "Lost in the Middle", a pair a line, and KEYS of the keys of each."""
    lines = bz2.decompress((PUBLIC / "kv140.jsonl.bz2").read_bytes()).splitlines()
    for i in HALVES["kv140"][half][: -(-n // KEYS)]:
        pairs = json.loads(lines[i])["ordered_kv_records"]
        text, places = _joined([f'"{key}": "{value}"' for key, value in pairs], ",\n")
        asked = list(zip(pairs, places))[len(pairs) // KEYS // 2 :: len(pairs) // KEYS]
        yield text, [Asked(key, f'What is the value of "{key}"?', value, [s], [s]) for (key, value), s in asked]


def subjects(half: str, n: int, n_paragraphs: int) -> Iterator[Text]:
    """What n texts of a half of XQuAD are about: the titles of the articles that their paragraphs are from."""
    question = "Which subjects is this text about? Name each of them."
    for i, own in enumerate(_mixed(half, n_paragraphs)[:n]):
        titles = "\n".join(sorted({title for title, _ in own}))
        yield _joined([text for _, text in own])[0], [Asked(f"subjects {i}", question, titles, [], [])]


def counts(half: str, n: int, n_paragraphs: int) -> Iterator[Text]:
    """In how many paragraphs of such texts a name stands: n names, each in two to six."""
    texts = [[text for _, text in own] for own in _mixed(half, n_paragraphs)]
    for i, own in enumerate(texts):
        names = sorted({name for text in own for name in re.findall(r"(?<=[a-z] )[A-Z][a-z]{4,}\b", text)})
        numbers = {name: sum(bool(re.search(rf"\b{name}\b", text)) for text in own) for name in names}
        question = "How many paragraphs of this text have the word {}? Answer with a number."
        random.Random("counts").shuffle(names)
        by_number = ([name for name in names if numbers[name] == number] for number in range(2, 7))
        turns = (name for turn in itertools.zip_longest(*by_number) for name in turn if name)  # each number as often
        drawn = list(itertools.islice(turns, len(range(i, n, len(texts)))))
        yield _joined(own)[0], [Asked(name, question.format(name), str(numbers[name]), [], []) for name in drawn]


def _mixed(half: str, n_paragraphs: int) -> list[list[tuple[str, str]]]:
    """All paragraphs of a half of XQuAD, each with its article's title, so many a text."""
    file = json.loads(bz2.decompress((PUBLIC / "xquad.en.json.bz2").read_bytes()))["data"]
    articles = [article for article in file if article["title"] in HALVES["xquad"][half]]
    every = [(article["title"].replace("_", " "), p["context"]) for article in articles for p in article["paragraphs"]]
    random.Random("finding").shuffle(every)
    return [every[at : at + n_paragraphs] for at in range(0, len(every) - n_paragraphs + 1, n_paragraphs)]


def unanswered(half: str, n: int, n_paragraphs: int) -> Iterator[Text]:
    """Texts of a half with questions of the other one, which they do not answer."""
    others = xquad("first" if half == "second" else "second", n, n_paragraphs)
    for (text, _), (_, asked) in zip(xquad(half, n, n_paragraphs), others):
        yield text, [Asked(one.id, one.question, NO_ANSWER, [], []) for one in asked]


def told(texts: Iterator[Text]) -> Iterator[Text]:
    """The same, and each question says what to answer if the text does not."""
    rest = f" If the text does not say it, answer with: {NO_ANSWER}"
    for text, asked in texts:
        yield text, [one._replace(question=one.question + rest) for one in asked]


def _joined(parts: Sequence[str], joiner: str = "\n\n") -> tuple[str, list[Span]]:
    ends = itertools.accumulate(len(part) + len(joiner) for part in parts)
    return joiner.join(parts), [(end - len(joiner + part), end - len(joiner)) for end, part in zip(ends, parts)]
