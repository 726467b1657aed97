"""Replay: the segments of a text that its question attends to most are repeated before the question."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd.checks import Integer, check
from pypcd.decode.method import Answering
from pypcd.decode.session import Session
from pypcd.engine import read_tensors, token_bytes
from pypcd.errors import PCDError, UnsupportedError
from pypcd.prompt import Prompt, prompt_tokens

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["Replay", "attention", "segment_spans"]


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


def attention(session: Session, prompt: Prompt, chat: bool, n_last: int = 1) -> npt.NDArray[np.float64]:
    """How much of its attention each head pays to each segment, from each of the prompt's last n_last tokens;
    float64[n, n_segments], a row for each head of each layer and each of these tokens.

    Raises:
        UnsupportedError: the model's graph has no attention weights, or llama.cpp is too old to name them.
        PCDError: the model's tokenizer changes the text.
    """
    tokens = prompt_tokens(session.llm, prompt, chat=chat)
    spans = segment_spans(session.llm, prompt, tokens)
    begin = max(len(tokens) - n_last, 0)
    session.start(tokens)
    session.back(begin)
    tensors = read_tensors(session.llm, ["kq_soft_max"], tokens[:begin], tokens[begin:])
    found = [w[0, :, :n_last, : len(tokens)] for parts in tensors.values() for w in parts]
    rows = [w.reshape(-1, len(tokens)) for w in found if w.shape[-1] == len(tokens)]  # not of caches that dropped some
    if not rows:
        raise UnsupportedError(
            "this llama.cpp names no attention weights of this model to rank segments by; use another method"
        )
    weights = np.concatenate(rows).astype(np.float64)
    return np.stack([weights[:, first:last].sum(axis=1) for first, last in spans], axis=1)


def segment_spans(llm: Llama, prompt: Prompt, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The tokens of each segment: index of the first, and one past the last. A token across a border counts for both.

    Raises:
        PCDError: the model's tokenizer changes the text, so segments cannot be found in it.
    """
    ends = np.cumsum([len(token_bytes(llm, token)) for token in tokens])
    text = b"".join(token_bytes(llm, token) for token in tokens)
    at = text.rfind(prompt.context.encode())
    if at < 0:
        raise PCDError(
            "this model's tokenizer changes the text, so the prompt's segments cannot be found in it; use another method"
        )
    spans = []
    for segment in prompt.segments:
        first, last = at, at + len(segment.encode())
        spans.append(
            (int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(ends, last - 1, side="right")) + 1)
        )
        at = last + len(prompt.joiner.encode())
    return spans
