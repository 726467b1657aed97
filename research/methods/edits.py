"""Edits: changes to a prompt before it is answered."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.decode import values_of
from pypcd.decode.method import Answering, Edited
from pypcd.decode.session import Session
from pypcd.errors import InputError, UnsupportedError
from pypcd.prompt import Prompt, lay
from pypcd.settings.ranges import Integer, check

__all__ = ["AttentionSort", "MedoidVote", "Rephrase", "parse_rephrase", "parse_sort", "parse_vote"]


@dataclasses.dataclass(frozen=True)
class Rephrase:
    """Context recalling: the model is asked to repeat what matters before it answers.

    The paper gives no wording. This one is in its authors' public LongBench script, where it is not used; it goes after
    the question.
    """

    request: str = " Please repeat the relevant content before analysis."

    def edit(self, session: Session, prompt: Prompt, *, chat: bool, answer: Answering) -> Edited:
        return Edited(prompt.replace(after=prompt.after + self.request))


@dataclasses.dataclass(frozen=True)
class AttentionSort:
    """Segment reranking by attention (arXiv 2310.01427): the segments with most attention move to the prompt's end.

    Segments are those of the Prompt. A segment's score is the attention of the prompt's last token to the segment's
    tokens, summed over these and averaged over layers and heads. Then the segments are sorted, and the prompt is
    evaluated again, `rounds` times in all.

    Args:
        rounds: 1 to 100; the authors' script has 3, their paper 5.
        ends: False: the highest score goes last, as published. True: the highest scores go to both ends in turn,
            starting with the last place, as the PCD paper's one sentence on reranking says.

    Raises:
        ValueError: a value is out of range.
    """

    rounds: int = 3
    ends: bool = False

    def __post_init__(self) -> None:
        check(self, rounds=Integer(1, 100))

    def edit(self, session: Session, prompt: Prompt, *, chat: bool, answer: Answering) -> Edited:
        _check_segments(prompt)
        for _ in range(self.rounds):
            scores = attention(session, prompt, chat)
            order = [int(i) for i in np.argsort(scores, kind="stable")]
            order = _ends(order) if self.ends else order
            if order == list(range(len(order))):
                break
            prompt = prompt.replace(segments=tuple(prompt.segments[i] for i in order))
        return Edited(prompt)


def attention(session: Session, prompt: Prompt, chat: bool) -> npt.NDArray[np.float64]:
    """How much of its attention the prompt's last token pays to each segment, averaged over heads; float64[n_segments].

    Raises:
        UnsupportedError: the model's attention cannot be read, or its tokenizer changes the text.
    """
    laid = lay(session.llm, prompt.turns, chat=chat, answer_prefix=prompt.answer_prefix)
    if not laid.segments:
        raise UnsupportedError("this model's tokenizer changes the text, so its parts cannot be found among the tokens")
    session.hold(laid.tokens[:-1], laid.n_text)
    pays = np.concatenate(list(engine.attention(session.llm, laid.tokens[:-1], laid.tokens[-1:], [1.0]).values()))
    return np.array([pays[:, first:last].sum(axis=1).mean() for first, last in laid.segments])


def _ends(ascending: Sequence[int]) -> list[int]:
    """The highest last, the second first, the third last but one, and so on; the lowest in the middle."""
    front: list[int] = []
    back: list[int] = []
    for k, i in enumerate(reversed(ascending)):
        (front if k % 2 else back).append(i)
    return front + back[::-1]


@dataclasses.dataclass(frozen=True)
class MedoidVote:
    """Medoid voting (arXiv 2407.03651): the question is answered with its segments in several random orders, and the
    answer most similar to the others (the medoid) wins.

    Similarity is the cosine of character trigram counts; the authors use an embedding service.

    Args:
        n: number of answers, 3 to 100; the authors find 3 enough.
        seed: seed of the random orders, at least 0.

    Raises:
        ValueError: a value is out of range.
    """

    n: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check(self, n=Integer(3, 100), seed=Integer(0))

    def edit(self, session: Session, prompt: Prompt, *, chat: bool, answer: Answering) -> Edited:
        _check_segments(prompt)
        rng = random.Random(f"{self.seed} {prompt.text}")  # other orders for each question
        prompts = [
            prompt.replace(segments=tuple(rng.sample(prompt.segments, len(prompt.segments)))) for _ in range(self.n)
        ]
        return Edited(prompts[medoid([answer(p) for p in prompts])])


def medoid(texts: Sequence[str]) -> int:
    """The index of the text most similar to the others; ties go to the first."""
    counts = [collections.Counter(text[i : i + 3] for i in range(max(len(text) - 2, 1))) for text in texts]

    def cosine(a: collections.Counter[str], b: collections.Counter[str]) -> float:
        dot = sum(n * b[gram] for gram, n in a.items())
        return dot / math.sqrt(sum(n * n for n in a.values()) * sum(n * n for n in b.values()))

    likeness = [sum(cosine(a, b) for j, b in enumerate(counts) if j != i) for i, a in enumerate(counts)]
    return max(range(len(texts)), key=lambda i: likeness[i])


def _check_segments(prompt: Prompt) -> None:
    if len(prompt.segments) < 2:
        raise InputError(
            f"the prompt has {len(prompt.segments)} segments; allowed: at least 2, since their order is changed; give "
            "the context of Prompt as segments"
        )


def parse_sort(words: Sequence[str], *, ends: bool = False) -> AttentionSort:
    """From the words behind the names segr and segr-ends: segr:3."""
    return values_of(functools.partial(AttentionSort, ends=ends), words, "rounds")


def parse_vote(words: Sequence[str]) -> MedoidVote:
    """From the words behind the name: segr-vote:5."""
    return values_of(MedoidVote, words, "n")


def parse_rephrase(words: Sequence[str]) -> Rephrase:
    """
    Raises:
        ValueError: there are words, but it takes no values.
    """
    if words:
        raise InputError(f"{':'.join(words)!r} follows a method that takes no values")
    return Rephrase()
