"""Posterior salience (Eq. 1 of the paper): how high the right answer ranks at the position where the answer begins.

The gold token is the most probable token that can begin the right answer. Its rank under one method is a reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Optional

import numpy as np

from pypcd.config import PCDConfig
from pypcd.decode import Session
from pypcd.evaluation.plan import BASELINE
from pypcd.evaluation.stats import paired
from pypcd.lab.questions import Question
from pypcd.method import rank
from pypcd.prompt import prompt_tokens
from pypcd.vocabulary import Vocabulary

__all__ = ["RANKS", "Reading", "SalienceRow", "count_ranks", "measure", "salience", "salience_rows"]

N_COMPETITORS = 5

# rank bins: from this rank up to the next one
RANKS = (1, 2, 3, 5, 9, 17, 33, 65)

_MAX_SKIPPED = 8

Settings = Mapping[str, Optional[PCDConfig]]


@dataclasses.dataclass(frozen=True)
class Reading:
    """One question's gold token under one method, at the position where the answer begins.

    Attributes:
        index: the question's number.
        method: the setting's name.
        n_tokens: number of tokens of the prompt.
        n_skipped: number of tokens written before the answer, such as a quotation mark.
        rank: the gold token's rank, from 1 (Eq. 1).
        gold: its text, in quotes and safe for a terminal.
        gold_logit: its logit; None if PCD excluded it, since it is not plausible.
        competitors: the best other tokens, text and logit, best first; without excluded ones.
    """

    index: int
    method: str
    n_tokens: int
    n_skipped: int
    rank: int
    gold: str
    gold_logit: float | None
    competitors: tuple[tuple[str, float], ...]


def salience(ranks: Iterable[int]) -> float | None:
    """S(L), the mean reciprocal rank (Eq. 1); None without ranks."""
    values = [1.0 / rank for rank in ranks]
    return sum(values) / len(values) if values else None


def measure(
    session: Session, questions: Iterable[Question], settings: Settings, vocabulary: Vocabulary, *, chat: bool = False
) -> Iterator[list[Reading]]:
    """Find the gold token's rank where the answer begins, for one question after another.

    The answer begins at the first position where plain decoding does not write a quotation mark, space, colon or
    backslash; every method gets the tokens that plain decoding writes before it. Of the tokens that can begin the right
    answer, the one with the highest logit is the gold token. Both are as in the paper's authors' code. Tokens that PCD
    excludes rank behind all others, in the order of L.

    Args:
        settings: by name; None is plain decoding.
        chat: use the model's chat template.

    Returns:
        The readings of a question, one for each setting, in their order.
    """
    for index, (prompt, answers) in enumerate(questions):
        gold = vocabulary.first_tokens(answers)
        tokens = prompt_tokens(session.llm, prompt, chat=chat)
        row = session.start(tokens)
        skipped: list[int] = []
        while len(skipped) < _MAX_SKIPPED and vocabulary.is_skipped(int(row.argmax())):
            skipped.append(int(row.argmax()))
            row = session.step({0: skipped[-1]})[0]
        readings = []
        for name, setting in settings.items():
            if setting is not None:
                row = session.start(tokens, setting)
                for token in skipped:
                    row = session.step({0: token})[0]
                logits = session.llm.pcd_logits().contrasted
            else:
                row = session.start(tokens)
                for token in skipped:
                    row = session.step({0: token})[0]
                logits = row
            best = max(gold, key=lambda token: (row[token], -token))
            others = [int(t) for t in np.argsort(-logits, kind="stable")[: N_COMPETITORS + 1] if t != best]
            readings.append(
                Reading(
                    index=index,
                    method=name,
                    n_tokens=len(tokens),
                    n_skipped=len(skipped),
                    rank=rank(row, gold),
                    gold=vocabulary.shown(best),
                    gold_logit=float(logits[best]) if np.isfinite(logits[best]) else None,
                    competitors=tuple(
                        (vocabulary.shown(t), float(logits[t])) for t in others if np.isfinite(logits[t])
                    )[:N_COMPETITORS],
                )
            )
        session.finish()
        yield readings


# -- over lengths -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SalienceRow:
    """One method at one length: a line of the table.

    Attributes:
        length: the requested length in tokens, with the answer.
        n_tokens: mean length of the prompts.
        n: number of questions.
        salience: S(L) over all questions.
        n_wrong: number of questions whose gold token plain decoding does not rank first.
        salience_wrong: S(L) over these, the same questions for every method.
        n_own_wrong: number of questions whose gold token this method does not rank first.
        salience_own_wrong: S(L) over those, as the authors plot it. Questions that the method corrects drop out of it.
        median_rank: over all questions.
        worst_rank: over all questions.
        difference: S(L) minus plain decoding's, over all questions.
        low: the lower end of its 95% bootstrap interval over questions.
        high: the upper end.
        p: p of the sign test on which of the two ranked the gold token higher.
        is_clear: whether this shows a difference, by the same rule as in evaluations.
        gold_logit: mean over the questions whose gold token is not excluded; None if there are none.
        competitor_logits: mean logits of the best other tokens, best first.
    """

    length: int
    method: str
    n_tokens: float
    n: int
    salience: float
    n_wrong: int
    salience_wrong: float | None
    n_own_wrong: int
    salience_own_wrong: float | None
    median_rank: float
    worst_rank: int
    difference: float
    low: float
    high: float
    p: float
    is_clear: bool
    gold_logit: float | None
    competitor_logits: tuple[float, ...]


def salience_rows(length: int, readings: Sequence[Sequence[Reading]]) -> list[SalienceRow]:
    """The readings of one length as table rows, one for each method; "greedy" (plain decoding) must be among them."""
    by_method: dict[str, list[Reading]] = {}
    for of_one in readings:
        for reading in of_one:
            by_method.setdefault(reading.method, []).append(reading)
    plain = np.array([r.rank for r in by_method[BASELINE]])

    made = []
    for method, items in by_method.items():
        ranks = np.array([r.rank for r in items])
        compared = paired((1 / ranks).tolist(), (1 / plain).tolist())  # in points: hundredths
        golds = [r.gold_logit for r in items if r.gold_logit is not None]
        columns = [
            [r.competitors[i][1] for r in items if len(r.competitors) > i]
            for i in range(max(len(r.competitors) for r in items))
        ]
        made.append(
            SalienceRow(
                length=length,
                method=method,
                n_tokens=float(np.mean([r.n_tokens for r in items])),
                n=len(items),
                salience=float(np.mean(1 / ranks)),
                n_wrong=int((plain > 1).sum()),
                salience_wrong=salience(ranks[plain > 1].tolist()),
                n_own_wrong=int((ranks > 1).sum()),
                salience_own_wrong=salience(ranks[ranks > 1].tolist()),
                median_rank=float(np.median(ranks)),
                worst_rank=int(ranks.max()),
                difference=compared.difference / 100,
                low=compared.low / 100,
                high=compared.high / 100,
                p=compared.p,
                is_clear=compared.is_clear,
                gold_logit=float(np.mean(golds)) if golds else None,
                competitor_logits=tuple(float(np.mean(column)) for column in columns if column),
            )
        )
    return made


def count_ranks(ranks: Iterable[int]) -> list[int]:
    """How many ranks fall into each bin of RANKS."""
    at = np.searchsorted(RANKS, list(ranks), side="right") - 1
    return np.bincount(at.astype(int), minlength=len(RANKS)).tolist()
