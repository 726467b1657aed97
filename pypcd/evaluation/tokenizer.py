"""A model's tokenizer, with the interface that tasks need (tasks.sample.Tokenizer)."""

from __future__ import annotations

from typing import Any

from pypcd.prompt import Prompt, prompt_tokens

__all__ = ["ModelTokenizer"]


class ModelTokenizer:
    """The tokenizer of a llama_cpp.Llama.

    Args:
        chat: whether prompts go through the model's chat template.
    """

    def __init__(self, llm: Any, *, chat: bool = False) -> None:
        self.llm, self.chat = llm, chat

    def count(self, prompt: Prompt) -> int:
        return len(prompt_tokens(self.llm, prompt, chat=self.chat))

    def encode(self, text: str) -> list[int]:
        return list(self.llm.tokenize(text.encode("utf-8", "replace"), special=False))
