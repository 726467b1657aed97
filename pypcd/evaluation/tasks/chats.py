"""Chats: conversations of three to six turns about everyday things, of which the last question is graded.

It asks for general knowledge (`chat-known`), or for something that the user has said in an earlier turn (`chat-earlier`). Longer
earlier turns make a conversation as long as is wanted: a turn goes on with sentences of its own, and then with those of other turns about
the same topic. Both tasks have the same conversations, and question i is the same at every length.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

from pypcd.evaluation.tasks import frozen
from pypcd.evaluation.tasks.metrics import first_named
from pypcd.evaluation.tasks.sample import Sample
from pypcd.prompt import Prompt

__all__ = ["CHATS", "Chat"]


@dataclasses.dataclass(eq=False)
class Chat(frozen.Written[frozen.Row]):
    """Conversations with a last question that has one certain answer.

    Attributes:
        what: "known": general knowledge; "earlier": something that the user has said.
    """

    what: Literal["known", "earlier"]

    metric = "accuracy"
    max_tokens = 16
    smallest = 0

    def __post_init__(self) -> None:
        self.name = f"chat-{self.what}"

    @property
    def questions(self) -> Sequence[frozen.Row]:
        return frozen.rows("chats")

    def score(self, prediction: str, sample: Sample) -> float:
        """1 if the answer's first line names the right answer before any wrong one."""
        return first_named(prediction, sample.answers[0], sample.extra["others"], sample.extra["spelt"])

    def sample(self, i: int, row: frozen.Row, size: int) -> Sample:
        """A conversation with this number of sentences in the earlier turns, besides the beginnings of the turns."""
        n_texts = len(row["begun"])
        texts = [
            [begun, *_sentences(row, k, size // n_texts + (k < size % n_texts))] for k, begun in enumerate(row["begun"])
        ]
        for k, where, sentence in row["told"]:
            texts[k].insert(1 + int(where * len(texts[k])), sentence)
        turns = [" ".join(text) for text in texts]
        shots = tuple((f"{question}\n", answer) for question, answer in zip(turns[::2], turns[1::2]))
        asked = row[self.what]
        depth = None if self.what == "known" else row["told"][0][0] // 2 / (len(shots) - 1)
        prompt = Prompt(shots=shots, after=asked["after"], answer_prefix=asked["answer_prefix"])
        answer = asked["answer"]
        return Sample(i, prompt, (answer,), depth, asked["extra"], gold=f" {answer}", end=".")


def _sentences(row: frozen.Row, k: int, n: int) -> list[str]:
    """n sentences of a conversation's text k: its own, then others about its topic."""
    own = row["sentences"][k]
    if n <= len(own):
        return own[:n]
    others = [sentence for sentence in _about(row["topics"][k // 2], k % 2) if sentence not in own]
    return [*own, *itertools.islice(itertools.cycle([*others, *own]), n - len(own))]


@functools.cache
def _about(topic: int, speaker: int) -> tuple[str, ...]:
    """All sentences about a topic by the user (0) or the assistant (1)."""
    found = (
        sentence
        for row in frozen.rows("chats")
        for k, of in enumerate(row["topics"])
        if of == topic
        for sentence in row["sentences"][2 * k + speaker]
    )
    return tuple(dict.fromkeys(found))


CHATS = (Chat("known"), Chat("earlier"))
