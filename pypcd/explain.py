"""`pypcd explain`: what the contrast does, token by token: the candidates' probabilities in L, in L* and after the contrast.

L are the model's own logits, L* those of PCD's second, local-aware evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pypcd.decode import Session
from pypcd.decode.vocabulary import Vocabulary
from pypcd.errors import InputError
from pypcd.settings.config import PCDConfig
from pypcd.settings.formula import log_softmax, rank

__all__ = ["Candidate", "Step", "explain"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A token that could come next.

    Attributes:
        token: its id.
        text: in quotes, safe for a terminal; "(end)" for the end of the answer.
        before: its probability in L.
        rank_before: its rank in L, from 1.
        local: its probability in L*; None if L* was not evaluated: only one token was plausible, or a floor (min_context,
            min_entropy, min_first_entropy) left the step plain, for floors of entropy where token and twin are evaluated one
            after the other.
        after: its probability in the contrasted logits; 0 if it is excluded.
        rank_after: its rank there; None if it is excluded.
        is_chosen: whether it is the token that was written.
        is_gold: whether it continues the right answer.
    """

    token: int
    text: str
    before: float
    rank_before: int
    local: float | None
    after: float
    rank_after: int | None
    is_chosen: bool
    is_gold: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """One generated token.

    Attributes:
        index: from 0.
        candidates: the best ones before and after the contrast, and the best gold one, sorted as after the contrast.
        beta: the strength of the contrast here (PCDLogits.beta); None if nothing was contrasted.
    """

    index: int
    candidates: tuple[Candidate, ...]
    beta: float | None

    @property
    def chosen(self) -> Candidate:
        """What was written."""
        return next(c for c in self.candidates if c.is_chosen)

    @property
    def plain(self) -> Candidate:
        """What plain decoding would have written here."""
        return min(self.candidates, key=lambda c: (c.rank_before, c.token))

    @property
    def is_changed(self) -> bool:
        return self.chosen != self.plain


def explain(
    session: Session,
    tokens: Sequence[int],
    setting: PCDConfig,
    vocabulary: Vocabulary,
    *,
    n_tokens: int = 16,
    n_top: int = 5,
    gold: str | None = None,
) -> Iterator[Step]:
    """Answer a prompt greedily with PCD, and give the candidates of every token.

    Args:
        tokens: the prompt's tokens.
        n_tokens: at most so many are generated; the end of the answer is the last.
        n_top: number of candidates from L, and from the contrasted logits.
        gold: the right answer; its tokens are marked as long as the answer follows it.

    Raises:
        ValueError: the prompt is empty or does not fit, or gold is empty.
        UnsupportedError: this model cannot run the setting.
    """
    if gold is not None and not gold.strip():
        raise InputError("gold is empty; give the right answer, or leave it out")
    written, right = b"", (gold or "").strip().encode()
    session.start(tokens, setting)
    try:
        for index in range(min(n_tokens, session.llm.n_ctx() - len(tokens))):
            marked = vocabulary.next_tokens(written, right) if gold is not None else []
            step = _step(session.llm.pcd_logits(), vocabulary, index, n_top, set(marked))
            yield step
            chosen = step.chosen.token
            if session.is_end(chosen):
                return
            written += vocabulary.text(chosen)
            if index + 1 < n_tokens:
                session.step({0: chosen})
    finally:
        session.finish()


def _step(rows: Any, vocabulary: Vocabulary, index: int, n_top: int, gold: set[int]) -> Step:
    standard, contrasted = rows.standard, rows.contrasted
    chosen = int(contrasted.argmax())
    tops = [np.argsort(-row, kind="stable")[:n_top] for row in (standard, contrasted)]
    listed = {int(t) for top in tops for t in top if top is tops[0] or np.isfinite(contrasted[t])}
    if gold:
        listed.add(max(gold, key=lambda t: (contrasted[t], standard[t], -t)))
    p_before, p_after = (np.exp(log_softmax(row)) for row in (standard, contrasted))
    p_over = None if rows.local is None else np.exp(log_softmax(rows.local))

    candidates = [
        Candidate(
            token=token,
            text=vocabulary.shown(token),
            before=float(p_before[token]),
            rank_before=rank(standard, token),
            local=None if p_over is None else float(p_over[token]),
            after=float(p_after[token]),
            rank_after=rank(contrasted, token) if np.isfinite(contrasted[token]) else None,
            is_chosen=token == chosen,
            is_gold=token in gold,
        )
        for token in sorted(listed, key=lambda t: (-contrasted[t], -standard[t], t))
    ]
    return Step(index, tuple(candidates), rows.beta)
