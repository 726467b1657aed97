"""Replay: the segments that the prompt's end attends to most are repeated before the question."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pypcd.checks import Integer, check
from pypcd.decode import values_of
from pypcd.decode.method import Answering
from pypcd.decode.session import Session
from pypcd.lab.methods.edits import attention
from pypcd.prompt import Prompt

__all__ = ["Replay", "parse"]


@dataclasses.dataclass(frozen=True)
class Replay:
    """After ReContext (arXiv 2607.02509): the segments that the prompt's last tokens attend to most, in their order, stand once more
    between the context and the question.

    The paper takes the attention of about 16 heads that were found to retrieve, and the sentences of the 8 tokens that get most. Which
    heads retrieve differs from model to model. So a segment counts here with the most that any head pays to it from any of the last tokens,
    which needs no list: heads that retrieve pay much to one place, others little to each. Segments are those of the Prompt.

    Args:
        n: how many segments at most, 1 to 100.
        n_tokens: how many tokens they have together at most, 1 to 4096. The first one has as many as it has.
        n_last: of how many last tokens, 1 to 64: about as many as a question has.

    Raises:
        ValueError: a value is out of range.
    """

    n: int = 2
    n_tokens: int = 256
    n_last: int = 16

    def __post_init__(self) -> None:
        check(self, n=Integer(1, 100), n_tokens=Integer(1, 4096), n_last=Integer(1, 64))

    def edit(self, session: Session, prompt: Prompt, *, chat: bool, answer: Answering) -> Prompt:
        if len(prompt.segments) < 2:
            return prompt
        scores = attention(session, prompt, chat, self.n_last).max(axis=0)
        best, left = list[int](), self.n_tokens
        for i in np.argsort(-scores, kind="stable")[: self.n]:
            left -= len(session.llm.tokenize(prompt.segments[i].encode(), add_bos=False, special=False))
            if best and left < 0:
                break
            best.append(int(i))
        again = prompt.joiner.join(prompt.segments[i] for i in sorted(best))
        return prompt.replace(after=f"\n\nThe most relevant parts again:\n{again}\n{prompt.after}")


def parse(words: Sequence[str]) -> Replay:
    """From the words behind the name: replay:8, replay:n_tokens=128."""
    return values_of(Replay, words, "n")
