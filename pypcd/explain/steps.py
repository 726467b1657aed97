"""What the contrast does, token by token: the candidates' probabilities in L, in L* and after the contrast.

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
from pypcd.settings.formula import entropy, log_softmax, rank

__all__ = ["Candidate", "Step", "explain", "strength_of"]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A token that could come next.

    Attributes:
        token: its id.
        text: in quotes, safe for a terminal; "(end)" for the end of the answer.
        before: its probability in L.
        rank_before: its rank in L, from 1.
        local: its probability in L*; None if L* was not evaluated: only one token was plausible, or the step is
            below a floor (Step.below), for floors of entropy where token and twin are evaluated one after the other.
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
        text: the token's text, as Candidate.text.
        candidates: the best ones before and after the contrast, and the best gold one, sorted as after the contrast.
        is_changed: whether plain decoding would have written another token here.
        beta: the strength of the contrast here (PCDLogits.beta); None if nothing was contrasted.
        below: why, if the step is plain decoding's: "min_context" (fewer tokens of context than the setting asks for,
            here or, with min_first_entropy, where the answer began), "min_first_entropy" (the model was sure of the answer's
            first token) or "min_entropy" (L has less entropy); else None.
    """

    index: int
    text: str
    candidates: tuple[Candidate, ...]
    is_changed: bool
    beta: float | None = None
    below: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


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
    is_early = len(tokens) < setting.min_context
    left = "min_context" if is_early and setting.min_first_entropy else None  # why it is plain to the answer's end
    session.start(tokens, setting)
    try:
        for index in range(min(n_tokens, session.llm.n_ctx() - len(tokens))):
            rows = session.llm.pcd_logits()
            marked = vocabulary.next_tokens(written, right) if gold is not None else []
            step = _step(rows, vocabulary, index, n_top, set(marked))
            if rows.beta is None and np.array_equal(rows.contrasted, rows.standard, equal_nan=True):
                is_early = len(tokens) + index < setting.min_context
                if index == 0 and entropy(rows.standard) < setting.min_first_entropy:
                    left = left or "min_first_entropy"
                step = dataclasses.replace(step, below="min_context" if is_early else left or "min_entropy")
            yield step
            chosen = next(c.token for c in step.candidates if c.is_chosen)
            if session.is_end(chosen):
                return
            written += vocabulary.text(chosen)
            if index + 1 < n_tokens:
                session.step({0: chosen})
    finally:
        session.finish()


def strength_of(step: Step) -> str:
    """How strong a step's contrast was, in words."""
    if step.below:
        return f"no contrast: below {step.below}"
    return "no contrast" if step.beta is None else f"beta {step.beta:.2f}"


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
    return Step(index, vocabulary.shown(chosen), tuple(candidates), chosen != int(standard.argmax()), rows.beta)
