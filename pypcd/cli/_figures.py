"""What one answer took, and where its passages stand, for people and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

import pypcd
from pypcd import engine
from pypcd.ask import Answer
from pypcd.cli._text import clean, wrap
from pypcd.decode.prompt_cache import MIN_TOKENS, N_LEFT, PromptCache
from pypcd.prompt import Laid
from pypcd.settings.config import typed

SHOWN = 3  # changed tokens in the line under an answer
_ENDS = {"length": "cut at max_tokens", "context": "the context is full", "interrupted": "stopped"}


class Figures:
    """Of an answer by a model, under the PCD setting in force."""

    def __init__(self, llm: pypcd.Llama, answer: Answer) -> None:
        written = answer.written
        self.answer, self.pcd, self.n_ctx = answer, llm.pcd, llm.n_ctx()
        self.n_tokens = len(written.tokens) + written.n_ended  # its end included
        self.context_used = written.n_prompt + self.n_tokens
        # tokens per second: the first one comes out of the prompt, and one token of a prompt alone says nothing
        self.rate = _rate(self.n_tokens - 1, written.seconds - written.prompt_seconds)
        self.prompt_rate = _rate(written.n_evaluated if written.n_evaluated > 1 else 0, written.prompt_seconds)
        self.did = dataclasses.replace(written.pcd or llm.last_answer, setting=self.pcd)
        # texts: the model's own token, and the one with PCD
        self.changed = [
            tuple(engine.token_bytes(llm, token).decode("utf-8", "replace") for token in (change.plain, change.token))
            for change in self.did.changes
        ]

    def line(self) -> str:
        def said(rate: float | None) -> str:
            return "-" if rate is None else f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"

        end = self.answer.written.end
        context = f"context {self.context_used}/{self.n_ctx}"
        if end == "stop" and self.n_tokens == 1:
            return f"the model ended at once | {context} | {self.what_pcd_did()}"
        rates = f"{said(self.rate)} tok/s | prompt {said(self.prompt_rate)} tok/s"
        ended = f" | {_ENDS[end]}" if end in _ENDS else ""
        return f"{self.n_tokens} tokens | {rates} | {context} | {self.what_pcd_did()}{ended}"

    def what_pcd_did(self) -> str:
        """A sentence, and the first of the texts that changed, each behind what the model alone would have written. Off does not mean that
        nothing was done: passages may have been repeated."""
        if not self.pcd and self.answer.written.found.passages:
            return f"replay, {self.did}"
        if self.pcd and not self.did.n_tokens:
            return f"PCD ({typed(self.pcd)})"
        shown = ", ".join(f"{before!r} to {after!r}" for before, after in self.changed[:SHOWN])
        more = f" and {len(self.changed) - SHOWN} more" if len(self.changed) > SHOWN else ""
        return f"{self.did}{f': {shown}{more}' if shown else ''}"

    def as_dict(self) -> dict[str, Any]:
        written = self.answer.written
        return {
            "finish_reason": written.end,
            "prompt_tokens": written.n_prompt,
            "cached_tokens": max(written.n_prompt - written.n_evaluated, 0),
            "completion_tokens": self.n_tokens,
            "tokens_per_second": self.rate and round(self.rate, 2),
            "prompt_tokens_per_second": self.prompt_rate and round(self.prompt_rate, 2),
            "context_used": self.context_used,
            "n_ctx": self.n_ctx,
            "pcd": self.pcd.as_dict() if self.pcd else None,
            **self.did.as_dict(),
            **passages(self.answer),
        }


def _rate(n: int, seconds: float) -> float | None:
    return n / seconds if n > 0 and seconds > 0 else None


def passages(answer: Answer) -> dict[str, Any]:
    """The passages of an answer, what was read, and the note, for JSON."""
    return {
        "passages": [dataclasses.asdict(source) for source in answer.passages],
        "read": answer.read,
        "note": answer.note,
    }


def lines(answer: Answer, note: str, width: int, option: str = "--read") -> list[str]:
    """Where the passages of an answer stand, a line for each, what was read, and a note; cleaned for a terminal of `width` cells.

    Args:
        option: what takes how much is read.
    """
    from rich.cells import cell_len, chop_cells  # slow to import

    found = []
    for number, source in enumerate(answer.passages, 1):
        line = clean(" ".join(f"{number}. {source.document}, {source.place}: {source.text}".split()))
        found.append(line if cell_len(line) <= width else chop_cells(line, max(width - 1, 2))[0] + "…")
    said = f"read {answer.read}; {option} all reads all" if answer.read else ""
    return found + [line for text in (said, note) if text for line in wrap(text, width)]


def takes(llm: pypcd.Llama, laid: Laid, cache: PromptCache) -> str:
    """How long a prompt's text takes to read, for behind a semicolon; empty if it is short, or nobody knows."""
    n = laid.n_text - N_LEFT
    if n < MIN_TOKENS:
        return ""
    held = llm.longest_token_prefix(llm.input_ids[: llm.n_tokens].tolist(), laid.tokens)
    n_left = n - max([held, *(entry.n_tokens for entry in cache.find(llm, laid.tokens[:n]))])
    if n_left < MIN_TOKENS:
        return "; it was read before"
    rate = cache.rate(llm)
    return f"; reading takes about {n_left / rate:.0f} s" if rate else ""
