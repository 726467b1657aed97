"""The loop that makes an answer: pieces of text as they come, figures, stop strings, Ctrl-C."""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pypcd
from pypcd import PCDError, engine
from pypcd.cli import _options
from pypcd.cli._reading import Kept, Reading, read
from pypcd.cli._text import Changed
from pypcd.errors import InputError
from pypcd.settings.config import typed


class ContextFull(PCDError):
    """A prompt does not fit in the context."""


SHOWN = 3  # changed tokens in the line under an answer
REPEATS = "it repeats itself; {} or {} is against that"  # such as options


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
    repeats: bool = False  # it was cut, and ends with one text again and again
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
    """One answer: iterate over its text, piece by piece; a piece of a token that PCD changed is a Changed. `text` and `figures`
    hold what has come so far.

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
        self._kept = kept
        # characters that may begin a stop string, and whether PCD changed them
        self._pending: list[tuple[str, bool]] = []
        self._read: Reading | None = None  # what was evaluated of the prompt before

    def after(self, reading: Reading) -> Generation:
        """The same, with what another part of this answer has evaluated in its figures."""
        self._read = reading
        return self

    def __iter__(self) -> Iterator[str]:
        figures, s = self.figures, self.sampling
        before = self._read.seconds if self._read else 0.0
        room = figures.n_ctx - figures.prompt_tokens
        limit = min(s.max_tokens or room, room)
        decode = _Decoder()
        start = first = time.perf_counter()
        self.llm.set_seed(self.seed)
        try:
            self._watch(True)
            self._prefill()
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
                    self._watch(False)  # a token is soon done, and the callback would slow it down
                    figures.prompt_seconds, first = now - start + before, now
                figures.seconds = now - first
                if engine.is_end(self.llm, token):
                    figures.finish_reason = "stop"
                    break
                yield from self._take(decode(engine.token_bytes(self.llm, token), self._is_changed()))
                if figures.finish_reason == "stop" or self.stopped():
                    break
                if figures.completion_tokens >= limit:
                    figures.finish_reason = "length" if s.max_tokens and s.max_tokens <= room else "context"
                    break
        except RuntimeError as error:  # llama_decode's status
            if not engine.rewind(self.llm, self.llm.n_tokens):  # a recurrent state, half-way
                self.llm.reset()
            if not self.stopped():
                raise PCDError(f"the model could not be evaluated: {error}") from error
        finally:
            self._watch(False)
            self._tell_changes()
        rest, self._pending = [*self._pending, *decode.end()], []
        yield from self._shown(rest)
        figures.repeats = figures.finish_reason in ("length", "context") and repeats(self.text)

    def _is_changed(self) -> bool:
        """Whether PCD changed the last token."""
        answer = self.llm.last_answer
        return bool(answer.changes) and answer.changes[-1].index == answer.n_tokens - 1

    def _tell_changes(self) -> None:
        llm, figures = self.llm, self.figures
        if figures.completion_tokens:  # else last_answer may be an earlier one
            figures.answer = dataclasses.replace(llm.last_answer, setting=figures.pcd)
            figures.changed = [
                tuple(engine.token_bytes(llm, token).decode("utf-8", "replace") for token in (c.plain, c.token))  # type: ignore[misc]
                for c in figures.answer.changes
            ]

    def _watch(self, on: bool) -> None:
        """Let Ctrl-C end a batch half-way (on the CPU; llama.cpp's GPU backends finish theirs)."""
        engine.set_abort(self.llm, self.stopped if on else None)

    def _prefill(self) -> None:
        """Evaluate all of the prompt but its last batch, which generate() does."""
        reading = read(self.llm, self.prompt, len(self.prompt) - self.llm.n_batch, self.stopped, self._kept)
        self.figures.cached_tokens = min((self._read or reading).n_cached, len(self.prompt) - 1)

    def _take(self, characters: Sequence[tuple[str, bool]]) -> Iterator[str]:
        """What may be shown now: all but a stop string or what may become one."""
        characters = [*self._pending, *characters]
        text = "".join(character for character, _ in characters)
        found = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if found:
            n, self._pending = min(found), []
            self.figures.finish_reason = "stop"
        else:
            n = len(text) - max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
            self._pending = characters[n:]
        return self._shown(characters[:n])

    def _shown(self, characters: Sequence[tuple[str, bool]]) -> Iterator[str]:
        """Characters as pieces of the answer."""
        self.text += "".join(character for character, _ in characters)
        for is_changed, run in itertools.groupby(characters, lambda one: one[1]):
            text = "".join(character for character, _ in run)
            yield Changed(text) if is_changed else text


def repeats(text: str) -> bool:
    """Whether a text ends with the same again and again: three times at least, and 60 characters."""
    end = text[-1800:]
    for n in range(1, len(end) // 3 + 1):
        same = next((i for i in range(len(end) - n) if end[-1 - i] != end[-1 - i - n]), len(end) - n)
        if same + n >= max(3 * n, 60):
            return True
    return False


class _Decoder:
    """Tokens' bytes as characters, each with whether one of its tokens is changed."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_changed = False  # one of the tokens of a character that has begun

    def __call__(self, data: bytes, is_changed: bool) -> list[tuple[str, bool]]:
        characters: list[tuple[str, bool]] = []
        for i in range(len(data)):
            text = self._utf8.decode(data[i : i + 1])
            is_open = bool(self._utf8.getstate()[0])
            if is_open and not text:
                self._is_changed |= is_changed
                continue
            if is_open or len(text) > 1:  # what had begun was no character, and this byte begins another one
                characters.append((text[0], self._is_changed))
                self._is_changed, text = False, text[1:]
            characters += [(c, self._is_changed or is_changed) for c in text]
            self._is_changed = is_open and is_changed
        return characters

    def end(self) -> list[tuple[str, bool]]:
        """What has begun and was no character."""
        return [(c, self._is_changed) for c in self._utf8.decode(b"", final=True)]
