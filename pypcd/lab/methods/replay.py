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
    """After ReContext (arXiv 2607.02509): the segments with most attention of the prompt's last tokens, in their order, stand once
    more between the context and the question.

    The paper takes the attention of about 16 heads that were found to retrieve, and the sentences of the 8 tokens that get most. Here
    all heads count, since their lists are made for each model, and segments are those of the Prompt. A prompt with n segments or fewer is
    answered as it is.

    Args:
        n: how many segments, 1 to 100.
        n_last: of how many last tokens, 1 to 64; the paper has 8.

    Raises:
        ValueError: a value is out of range.
    """

    n: int = 4
    n_last: int = 8

    def __post_init__(self) -> None:
        check(self, n=Integer(1, 100), n_last=Integer(1, 64))

    def edit(self, session: Session, prompt: Prompt, *, chat: bool, answer: Answering) -> Prompt:
        if len(prompt.segments) <= self.n:
            return prompt
        scores = attention(session, prompt, chat, self.n_last).max(axis=0)
        best = sorted(np.argsort(-scores, kind="stable")[: self.n])
        again = prompt.joiner.join(prompt.segments[i] for i in best)
        return prompt.replace(after=f"\n\nThe most relevant parts again:\n{again}\n{prompt.after}")


def parse(words: Sequence[str]) -> Replay:
    """From the words behind the name: replay:8."""
    return values_of(Replay, words, "n")
