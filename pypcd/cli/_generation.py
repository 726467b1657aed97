"""The loop that makes an answer: pieces of text as they come, figures, stop strings, Ctrl-C."""

from __future__ import annotations

import codecs
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pypcd
from pypcd import PCDError, engine
from pypcd.cli import _options
from pypcd.cli._reading import Kept, Reading, evaluating, read
from pypcd.errors import InputError
from pypcd.settings.config import typed


class ContextFull(PCDError):
    """A prompt does not fit in the context."""


SHOWN = 3  # changed tokens in the line under an answer


@dataclasses.dataclass
class Figures:
    """What one answer took."""

    n_ctx: int
    pcd: pypcd.PCDConfig | None
    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, kept from the turn before
    completion_tokens: int = 0  # its end included
    prompt_seconds: float = 0.0
    seconds: float = 0.0  # after the prompt
    finish_reason: str = "interrupted"  # or stop, length (max_tokens), context (full)
    answer: pypcd.PCDAnswer = dataclasses.field(default_factory=pypcd.PCDAnswer)
    # texts: the model's own token, and the one with PCD
    changed: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float | None:
        """Tokens per second; the first one comes out of the prompt."""
        return (self.completion_tokens - 1) / self.seconds if self.completion_tokens > 1 and self.seconds > 0 else None

    @property
    def prompt_rate(self) -> float | None:
        """Of the part that was evaluated; one token alone says nothing."""
        n = self.prompt_tokens - self.cached_tokens
        return n / self.prompt_seconds if n > 1 and self.prompt_seconds > 0 else None

    @property
    def context_used(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def line(self) -> str:
        def rate(value: float | None) -> str:
            return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"

        if self.finish_reason == "stop" and self.completion_tokens == 1:
            return f"the model ended at once | context {self.context_used}/{self.n_ctx} | {self.what_pcd_did()}"
        ends = {"length": "cut at max_tokens", "context": "the context is full", "interrupted": "stopped"}
        parts = [
            f"{self.completion_tokens} tokens",
            f"{rate(self.rate)} tok/s",
            f"prompt {rate(self.prompt_rate)} tok/s",
            f"context {self.context_used}/{self.n_ctx}",
            self.what_pcd_did(),
            *([ends[self.finish_reason]] if self.finish_reason in ends else []),
        ]
        return " | ".join(parts)

    def what_pcd_did(self) -> str:
        """A sentence, and the first of the texts that changed, each behind what the model alone would have written."""
        if self.pcd and not self.answer.n_tokens:
            return f"PCD ({typed(self.pcd)})"
        shown = ", ".join(f"{before!r} to {after!r}" for before, after in self.changed[:SHOWN])
        more = f" and {len(self.changed) - SHOWN} more" if len(self.changed) > SHOWN else ""
        return f"{self.answer}{f': {shown}{more}' if shown else ''}"

    def as_dict(self) -> dict[str, Any]:
        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, 2)

        return {
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "tokens_per_second": rounded(self.rate),
            "prompt_tokens_per_second": rounded(self.prompt_rate),
            "context_used": self.context_used,
            "n_ctx": self.n_ctx,
            "pcd": self.pcd.as_dict() if self.pcd else None,
            **self.answer.as_dict(),
        }


class Generation:
    """One answer: iterate over its text, piece by piece. `text` and `figures` hold what has come so far.

    llama_cpp's own stream is not used here: it gives no figures, goes silent at a broken UTF-8 byte, and cannot be
    stopped while it reads the prompt.

    Raises:
        ContextFull: the prompt leaves no room for an answer.
    """

    def __init__(
        self,
        llm: pypcd.Llama,
        prompt: Sequence[int],
        sampling: _options.GenerationSettings,
        *,
        stop: Sequence[str] = (),
        stopped: Callable[[], bool] = lambda: False,
        kept: Kept | None = None,
        before: Reading | None = None,
    ) -> None:
        n_ctx = llm.n_ctx()
        if not prompt:
            raise InputError("the prompt is empty")
        if len(prompt) >= n_ctx:
            raise ContextFull(f"{len(prompt)} tokens do not fit in the context of {n_ctx}")
        self.llm, self.prompt, self.sampling = llm, list(prompt), sampling
        self.stop, self.stopped = [s for s in stop if s], stopped
        self.seed = sampling.draw_seed()
        self.text = ""
        self.figures = Figures(n_ctx, llm.pcd, len(self.prompt))
        self._kept, self._before = kept, before
        self._pending = ""  # what may begin a stop string

    def __iter__(self) -> Iterator[str]:
        figures, s = self.figures, self.sampling
        room = figures.n_ctx - figures.prompt_tokens
        limit = min(s.max_tokens or room, room)
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.llm.set_seed(self.seed)
        try:
            with evaluating(self.llm, self.stopped):
                start = first = time.perf_counter()
                # generate() evaluates the last batch
                n = figures.prompt_tokens
                reading = read(self.llm, self.prompt, n - self.llm.n_batch, self.stopped, self._kept)
                figures.cached_tokens = min((self._before or reading).n_cached, n - 1)
                tokens = self.llm.generate(
                    self.prompt,
                    temp=s.temperature,
                    top_k=s.top_k,
                    top_p=s.top_p,
                    min_p=s.min_p,
                    repeat_penalty=s.repeat_penalty,
                )
                for token in tokens:
                    now = time.perf_counter()
                    figures.completion_tokens += 1
                    if figures.completion_tokens == 1:
                        engine.set_abort(self.llm, None)  # a token is soon done, and the callback would slow it down
                        figures.prompt_seconds, first = now - start + (self._before.seconds if self._before else 0), now
                    figures.seconds = now - first
                    if engine.is_end(self.llm, token):
                        figures.finish_reason = "stop"
                        break
                    yield from self._take(utf8.decode(engine.token_bytes(self.llm, token)))
                    if figures.finish_reason == "stop" or self.stopped():
                        break
                    if figures.completion_tokens >= limit:
                        figures.finish_reason = "length" if s.max_tokens and s.max_tokens <= room else "context"
                        break
        finally:
            self._tell_changes()
        rest, self._pending = self._pending + utf8.decode(b"", final=True), ""
        yield from self._shown(rest)

    def _tell_changes(self) -> None:
        llm, figures = self.llm, self.figures
        if figures.completion_tokens:  # else last_answer may be an earlier one
            figures.answer = dataclasses.replace(llm.last_answer, setting=figures.pcd)
            figures.changed = [
                tuple(engine.token_bytes(llm, token).decode("utf-8", "replace") for token in (c.plain, c.token))  # type: ignore[misc]
                for c in figures.answer.changes
            ]

    def _take(self, text: str) -> Iterator[str]:
        """What may be shown now: all but a stop string or what may become one."""
        text = self._pending + text
        found = [at for at in map(text.find, self.stop) if at >= 0]
        if found:
            n, self._pending = min(found), ""
            self.figures.finish_reason = "stop"
        else:
            n = len(text) - max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
            self._pending = text[n:]
        return self._shown(text[:n])

    def _shown(self, piece: str) -> Iterator[str]:
        self.text += piece
        if piece:
            yield piece
