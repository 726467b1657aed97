#!/usr/bin/env python3
"""Replay with several headings over the passages, on short documents and with answers that the model begins by itself.

    python scripts/recipes/replay_words.py MODEL --n 100

The tasks of `pypcd eval` give an answer its beginning, so nothing else can begin it there. A question is asked through the model's chat
template, if it has one. An answer is right if it has the right value and no other one of the document. *Copied*: it has words of the heading,
or looks like a quotation.
"""

from __future__ import annotations

import argparse
import random
from typing import Callable
from unittest import mock

import pypcd
from pypcd.decode import Session, parse, replay
from pypcd.document import Document
from pypcd.evaluation import paired
from pypcd.evaluation.tasks import prose
from pypcd.evaluation.tasks.people import ATTRIBUTES
from pypcd.evaluation.tasks.words import LAST_NAMES
from pypcd.prompt import Prompt, has_template

JOINED = {
    "From the text above": replay.repeated,
    "The most relevant parts again": lambda found, joiner: f"The most relevant parts again:\n{joiner.join(found)}\n\n",
    "no heading": lambda found, joiner: joiner.join(found) + "\n\n",
    "quoted": lambda found, joiner: "> " + joiner.join(found).replace("\n", "\n> ") + "\n\n",
}  # fmt: skip
KINDS = [kind for kind in ATTRIBUTES if len(kind.values) >= 10]  # a value for each person
COPIED = ("from the text above", "relevant part")


def question(index: int) -> tuple[Document, str, str, list[str]]:
    """A document about two to ten people, a question about one, the right value and the others of its kind."""
    rng = random.Random(f"replay words {index}")
    n = rng.choice((2, 3, 3, 4, 5, 6, 8, 10))
    names, kinds, n_more = rng.sample(LAST_NAMES, n), rng.sample(KINDS, 3), rng.choice((0, 0, 1, 3))
    values = {kind.name: rng.sample(kind.values, n) for kind in kinds}
    unrelated = prose.sentences(rng)
    paragraphs = []
    for i, name in enumerate(names):
        said = [kind.said(name, values[kind.name][i], rng) for kind in kinds]
        paragraphs.append(" ".join([*said, *(next(unrelated) for _ in range(n_more))]))
    i, kind = rng.randrange(n), rng.choice(kinds)
    right = values[kind.name].pop(i)
    asked = rng.choice(kind.questions).format(name=names[i])
    return Document.of("people", "\n\n".join(paragraphs)), asked, right, values[kind.name]


def is_right(text: str, right: str, others: list[str]) -> bool:
    return right.lower() in text.lower() and not any(other.lower() in text.lower() for other in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--n", type=int, default=100, help="questions (default %(default)s)")
    add("--max-tokens", type=int, default=40)
    add("--threads", type=int, default=1)
    args = parser.parse_args()
    llm = pypcd.Llama(args.model, n_ctx=2048, n_threads=args.threads, n_threads_batch=args.threads)
    session, chat, method = Session(llm), has_template(llm), parse("replay")
    scores: dict[str, list[float]] = {name: [] for name in ("plain", *JOINED)}
    copied = dict.fromkeys(scores, 0)

    def answer(name: str, prompt: Prompt, words: Callable[..., str] | None) -> str:
        made = parse("greedy") if words is None else method
        with mock.patch.object(replay, "repeated", words or replay.repeated):
            return made.generate(session, prompt, max_tokens=args.max_tokens, chat=chat, stop="" if chat else "\n").text

    for index in range(args.n):
        document, asked, right, others = question(index)
        prompt = document.prompt(asked if chat else f"Question: {asked}\nAnswer:")
        for name, words in {"plain": None, **JOINED}.items():
            text = answer(name, prompt, words)
            scores[name].append(float(is_right(text, right, others)))
            copied[name] += text.lstrip().startswith(">") or any(part in text.lower() for part in COPIED)
        session.clear()
    print("| heading | right, % | against plain | wins / losses | copied |\n| --- | ---: | ---: | ---: | ---: |")
    for name, found in scores.items():
        of = paired(found, scores["plain"])
        against = (
            f"{of.difference:+.1f} [{of.low:+.1f}, {of.high:+.1f}] | {of.wins} / {of.losses}"
            if name != "plain"
            else " | "
        )
        print(f"| {name} | {100 * sum(found) / len(found):.1f} | {against} | {copied[name]} of {len(found)} |")


if __name__ == "__main__":
    main()
