"""Replay: the segments of a text that its question attends to most are repeated before the question."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd.decode.method import Answering
from pypcd.decode.session import Session
from pypcd.engine import read_tensors
from pypcd.errors import PCDError, UnsupportedError
from pypcd.prompt import Prompt, find_texts, prompt_tokens
from pypcd.settings.ranges import Integer, check

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["Replay", "attention", "attention_weights", "repeated", "segment_spans"]


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
        tokens = prompt_tokens(session.llm, prompt, chat=chat)
        weights = _attention(session, tokens, self.n_last)
        found = self.passages(session.llm, tokens, [prompt], weights)
        if not found:
            return prompt
        again = repeated(found, prompt.joiner)
        return prompt.replace(after="\n\n" + again + prompt.after.lstrip("\n"))

    def passages(
        self, llm: Llama, tokens: Sequence[int], texts: Sequence[Prompt], weights: npt.NDArray[np.float64]
    ) -> list[str]:
        """The segments that get most attention, in the order in which they stand in the prompt; none if that would be all of them:
        small models take a text that stands there twice for a pattern to go on with.

        Args:
            tokens: the prompt's.
            texts: whose segments; the rest of each does not matter.
            weights: as attention_weights() gives them.

        Raises:
            PCDError: the model's tokenizer changes the text.
        """
        segments = [segment for text in texts for segment in text.segments]
        spans = segment_spans(llm, texts, tokens)
        scores = np.array([weights[:, first:last].sum(axis=1).max() for first, last in spans])
        best, left = list[int](), self.n_tokens
        for i in np.argsort(-scores, kind="stable"):
            if segments[i] in (segments[j] for j in best):  # of a document that is there twice
                continue
            left -= len(llm.tokenize(segments[i].encode(), add_bos=False, special=False))
            if len(best) == self.n or (best and left < 0):
                break
            best.append(int(i))
        return [segments[i] for i in sorted(best)] if len(best) < len(set(segments)) else []


def repeated(passages: Sequence[str], joiner: str = "\n\n") -> str:
    """How passages are written between the text and the question. Small models copy some other headings into their answers, and go on
    with passages that have none (docs/lab/evidence.md)."""
    return f"From the text above:\n\n{joiner.join(passages)}\n\n"


def attention(session: Session, prompt: Prompt, chat: bool, n_last: int = 1) -> npt.NDArray[np.float64]:
    """How much of its attention each head pays to each segment, from each of the prompt's last n_last tokens;
    float64[n, n_segments], a row for each head of each layer and each of these tokens.

    Raises:
        UnsupportedError: the model's graph has no attention weights, or llama.cpp is too old to name them.
        PCDError: the model's tokenizer changes the text.
    """
    tokens = prompt_tokens(session.llm, prompt, chat=chat)
    spans = segment_spans(session.llm, [prompt], tokens)
    weights = _attention(session, tokens, n_last)
    return np.stack([weights[:, first:last].sum(axis=1) for first, last in spans], axis=1)


def _attention(session: Session, tokens: Sequence[int], n_last: int) -> npt.NDArray[np.float64]:
    begin = max(len(tokens) - n_last, 0)
    session.start(tokens)
    session.back(begin)
    return attention_weights(session.llm, tokens[:begin], tokens[begin:])


def attention_weights(llm: Llama, past: Sequence[int], last: Sequence[int]) -> npt.NDArray[np.float64]:
    """The attention weights of tokens behind others, which sequence 0 holds; float64[n, len(past) + len(last)], a row for each head
    of each layer and each of the last tokens. Whether the sequence then holds these too is not said.

    Raises:
        UnsupportedError: the model's graph has no attention weights, or llama.cpp is too old to name them.
    """
    n = len(past) + len(last)
    tensors = read_tensors(llm, ["kq_soft_max"], past, last)
    found = [w[0, :, : len(last), :n] for parts in tensors.values() for w in parts]
    rows = [w.reshape(-1, n) for w in found if w.shape[-1] == n]  # not of caches that dropped some
    if not rows:
        raise UnsupportedError(
            "this llama.cpp names no attention weights of this model to rank segments by; use another method"
        )
    return np.concatenate(rows).astype(np.float64)


def segment_spans(llm: Llama, texts: Sequence[Prompt], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The tokens of each segment of these texts: index of the first, and one past the last. A token across a border counts for both.

    Raises:
        PCDError: the model's tokenizer changes the text, so segments cannot be found in it.
    """
    ends, begins = find_texts(llm, tokens, [text.context for text in texts])
    if min(begins) < 0:
        raise PCDError(
            "this model's tokenizer changes the text, so the prompt's segments cannot be found in it; use another method"
        )
    spans = []
    for text, at in zip(texts, begins):
        for segment in text.segments:
            last = at + len(segment.encode())
            pair = int(np.searchsorted(ends, at, side="right")), int(np.searchsorted(ends, last - 1, side="right")) + 1
            spans.append(pair)
            at = last + len(text.joiner.encode())
    return spans
