"""Reading a prompt: what the context holds of it stays, what is on disk is read back, the rest is evaluated."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

import llama_cpp

import pypcd
from pypcd import engine
from pypcd.cli import _terminal
from pypcd.prompt import n_tokens_through
from pypcd.prompt_cache import MIN_TOKENS, N_LEFT, PromptCache

FIRST = 64  # tokens of a long prompt that are read before the others: then the bar tells how long it will take


@dataclasses.dataclass(frozen=True)
class Reading:
    """A part of a prompt that was read.

    Attributes:
        n_cached: of its tokens, those that were in the context or on disk.
        seconds: that it took.
    """

    n_cached: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Kept:
    """The beginning of a prompt, nearly to the end of its last document, which is kept on disk.

    Attributes:
        n: its number of tokens.
        names: of the documents, for people.
    """

    cache: PromptCache
    n: int
    names: Sequence[str]

    @classmethod
    def of(
        cls, cache: PromptCache | None, llm: pypcd.Llama, prompt: Sequence[int], documents: dict[str, str]
    ) -> Kept | None:
        """None: nothing is kept of this prompt.

        Args:
            documents: texts by their names.
        """
        if cache is None or not documents or len(prompt) < MIN_TOKENS:
            return None
        n = max(n_tokens_through(llm, prompt, text) for text in documents.values()) - N_LEFT
        return cls(cache, n, list(documents)) if n >= MIN_TOKENS else None


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
    cached = done = llm.longest_token_prefix(llm.input_ids[: llm.n_tokens].tolist(), prompt)
    restored = kept.cache.restore(llm, prompt[:n_kept]) if kept is not None and done < n_kept else 0
    cached = done = restored or done
    is_new = done < n_kept
    if done < n or is_new:
        if not restored and not engine.rewind(llm, done):  # a recurrent state cannot go back
            cached = done = 0
            llm.reset()
        llm.n_tokens = done
        with _terminal.progress(len(prompt) - done, "reading the prompt") as bar:

            def go_on(n: int, end: int) -> None:
                at = llm.n_tokens
                while at < n:
                    size = FIRST if at == done and n - at > llm.n_batch else llm.n_batch
                    part = prompt[at : min(at + size, end)]
                    with engine.suspended(llm):  # these logits are not read
                        llama_cpp.Llama.eval(llm, part)
                    if stopped():
                        raise RuntimeError("stopped")
                    at += len(part)
                    bar.update(len(part))

            if kept is not None and is_new:
                go_on(n_kept, n_kept)
                seconds, n_new = time.perf_counter() - started, n_kept - done
                about = {
                    "model": pathlib.Path(llm.model_path).name,
                    "documents": list(kept.names),
                    "tokens_per_second": round(n_new / seconds, 3),
                }
                kept.cache.keep(llm, prompt[:n_kept], about)
            go_on(n, len(prompt))
    return Reading(cached, time.perf_counter() - started)
