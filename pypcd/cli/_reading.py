"""Reading a prompt: what the context or the disk has of it stays, and its documents are kept on disk once they were read."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence

import llama_cpp

import pypcd
from pypcd import PCDError, engine
from pypcd.cli import _terminal
from pypcd.decode.prompt_cache import MIN_TOKENS, N_LEFT, PromptCache
from pypcd.document import Document
from pypcd.prompt import n_tokens_through

FIRST = 64  # tokens of a long prompt that are read before the others: then the bar tells how long it will take


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
        cls, cache: PromptCache | None, llm: pypcd.Llama, prompt: Sequence[int], documents: Sequence[Document]
    ) -> Kept | None:
        """None: nothing is kept of this prompt, since it is short, or a document is not in it as it is."""
        if cache is None or not documents or len(prompt) < MIN_TOKENS:
            return None
        n = n_tokens_through(llm, prompt, [document.text for document in documents]) - N_LEFT
        return cls(cache, n, [document.name for document in documents]) if n >= MIN_TOKENS else None


def takes(llm: pypcd.Llama, prompt: Sequence[int], kept: Kept | None) -> str:
    """How long a prompt with documents takes to read, for behind a semicolon; empty if it is short, or nobody knows."""
    if kept is None:
        return ""
    on_disk = [entry.n_tokens for entry in kept.cache.find(llm, prompt[: kept.n])]
    n_left = kept.n - max([n_held(llm, prompt), *on_disk])
    if n_left < MIN_TOKENS:
        return "; it was read before"
    rate = kept.cache.rate(llm)
    return f"; reading takes about {n_left / rate:.0f} s" if rate else ""


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
    if not engine.rewind(llm, llm.n_tokens, 0):  # a recurrent state cannot
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
