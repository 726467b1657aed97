"""Documents that are kept on disk once they were read, and how long reading them takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pypcd
from pypcd.cli._generation import n_held
from pypcd.decode.prompt_cache import MIN_TOKENS, N_LEFT, PromptCache
from pypcd.document import Document
from pypcd.prompt import n_tokens_through


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
