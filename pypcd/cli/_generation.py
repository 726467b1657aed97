"""Reading a prompt, of which stays what the context or the disk has; and the loop that makes an answer: pieces of text as they come,
figures, stop strings, Ctrl-C."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp

import pypcd
from pypcd import PCDError, engine
from pypcd.cli import _options, _terminal
from pypcd.cli._text import Changed
from pypcd.errors import InputError
from pypcd.settings.config import typed

if TYPE_CHECKING:
    from pypcd.cli._reading import Kept


class ContextFull(PCDError):
    """A prompt does not fit in the context."""


FIRST = 64  # tokens of a long prompt that are read before the others: then the bar tells how long it will take
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


@dataclasses.dataclass(frozen=True)
class Reading:
    """A part of a prompt that was read.

    Attributes:
        n_cached: of its tokens, those that were in the context or on disk.
        seconds: that it took.
    """

    n_cached: int
    seconds: float


def n_held(llm: pypcd.Llama, prompt: Sequence[int]) -> int:
    """How many tokens of a prompt the context holds."""
    return llm.longest_token_prefix(llm.input_ids[: llm.n_tokens].tolist(), prompt)


def go_back(llm: pypcd.Llama, n: int) -> None:
    """Forget what is behind the first n tokens."""
    llm.n_tokens = min(llm.n_tokens, n)
    if not engine.rewind(llm, llm.n_tokens):  # a recurrent state cannot
        llm.reset()


@contextlib.contextmanager
def evaluating(llm: pypcd.Llama, stopped: Callable[[], bool]) -> Iterator[None]:
    """A block that Ctrl-C ends within a batch (on the CPU; llama.cpp's GPU backends finish theirs). A batch that was not finished is
    forgotten.

    Raises:
        PCDError: llama_decode failed.
    """
    engine.set_abort(llm, stopped)
    try:
        yield
    except RuntimeError as error:
        go_back(llm, llm.n_tokens)
        if stopped():
            return
        if isinstance(error, PCDError):
            raise
        raise PCDError(f"the model could not be evaluated: {error}") from error
    finally:
        engine.set_abort(llm, None)


def read(
    llm: pypcd.Llama, prompt: Sequence[int], n: int, stopped: Callable[[], bool], kept: Kept | None = None
) -> Reading:
    """Evaluate the first n tokens of a prompt or some more (at most a batch in all but the last), unless the context has them.

    Args:
        kept: what is read back from disk, or is written there once it was evaluated. It is evaluated by itself, so that an answer does
            not depend on where it came from.

    Raises:
        RuntimeError: it was stopped, or llama_decode failed.
    """
    started = time.perf_counter()
    n_kept = min(kept.n, len(prompt)) if kept else 0
    restored = kept.cache.restore(llm, prompt[:n_kept]) if kept and n_held(llm, prompt) < n_kept else 0
    cached = restored or n_held(llm, prompt)  # a file that could not be loaded has emptied the context
    if cached < max(n, n_kept):
        if not restored:
            go_back(llm, cached)
            cached = llm.n_tokens
        with _terminal.progress(len(prompt) - cached, "reading the prompt") as bar:

            def go_on(n: int, end: int) -> None:
                while llm.n_tokens < n:
                    at = llm.n_tokens
                    size = FIRST if at == cached and n - at > llm.n_batch else llm.n_batch
                    with engine.pcd(llm).suspended():  # these logits are not read
                        llama_cpp.Llama.eval(llm, prompt[at : min(at + size, end)])
                    if stopped():
                        raise RuntimeError("stopped")
                    bar.update(llm.n_tokens - at)

            if kept and cached < n_kept:
                go_on(n_kept, n_kept)
                about = {
                    "model": pathlib.Path(llm.model_path).name,
                    "documents": list(kept.names),
                    "tokens_per_second": round((n_kept - cached) / (time.perf_counter() - started), 3),
                }
                kept.cache.keep(llm, prompt[:n_kept], about)
            go_on(n, len(prompt))
    return Reading(cached, time.perf_counter() - started)


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
        # characters that may begin a stop string, and whether PCD changed them
        self._pending: list[tuple[str, bool]] = []

    def __iter__(self) -> Iterator[str]:
        figures, s = self.figures, self.sampling
        room = figures.n_ctx - figures.prompt_tokens
        limit = min(s.max_tokens or room, room)
        decode = _Decoder()
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
                    yield from self._take(decode(engine.token_bytes(self.llm, token), self._is_changed()))
                    if figures.finish_reason == "stop" or self.stopped():
                        break
                    if figures.completion_tokens >= limit:
                        figures.finish_reason = "length" if s.max_tokens and s.max_tokens <= room else "context"
                        break
        finally:
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
