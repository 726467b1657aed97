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
        self.n_ctx, self.pcd, self.answer, self.written = llm.n_ctx(), llm.pcd, answer, answer.written
        self.did = dataclasses.replace(self.written.pcd or llm.last_answer, setting=self.pcd)
        # texts: the model's own token, and the one with PCD
        self.changed = [
            tuple(engine.token_bytes(llm, token).decode("utf-8", "replace") for token in (change.plain, change.token))
            for change in self.did.changes
        ]

    @property
    def completion_tokens(self) -> int:
        """Its end included."""
        return len(self.written.tokens) + self.written.n_ended

    @property
    def rate(self) -> float | None:
        """Tokens per second; the first one comes out of the prompt."""
        n, seconds = self.completion_tokens - 1, self.written.seconds - self.written.prompt_seconds
        return n / seconds if n > 0 and seconds > 0 else None

    @property
    def prompt_rate(self) -> float | None:
        """Of the part that was evaluated; one token alone says nothing."""
        n, seconds = self.written.n_evaluated, self.written.prompt_seconds
        return n / seconds if n > 1 and seconds > 0 else None

    @property
    def context_used(self) -> int:
        return self.written.n_prompt + self.completion_tokens

    def line(self) -> str:
        def rate(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"

        if self.written.end == "stop" and self.completion_tokens == 1:
            return f"the model ended at once | context {self.context_used}/{self.n_ctx} | {self.what_pcd_did()}"
        parts = [
            f"{self.completion_tokens} tokens",
            f"{rate(self.rate)} tok/s",
            f"prompt {rate(self.prompt_rate)} tok/s",
            f"context {self.context_used}/{self.n_ctx}",
            self.what_pcd_did(),
            *([_ENDS[self.written.end]] if self.written.end in _ENDS else []),
        ]
        return " | ".join(parts)

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
        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, 2)

        return {
            "finish_reason": self.written.end,
            "prompt_tokens": self.written.n_prompt,
            "cached_tokens": max(self.written.n_prompt - self.written.n_evaluated, 0),
            "completion_tokens": self.completion_tokens,
            "tokens_per_second": rounded(self.rate),
            "prompt_tokens_per_second": rounded(self.prompt_rate),
            "context_used": self.context_used,
            "n_ctx": self.n_ctx,
            "pcd": self.pcd.as_dict() if self.pcd else None,
            **self.did.as_dict(),
            **passages(self.answer),
        }


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
