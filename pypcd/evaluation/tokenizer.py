"""A model's tokenizer, with the interface that tasks need (tasks._sample.Tokenizer)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pypcd.engine import detokenize
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

    def decode(self, tokens: Sequence[int]) -> str:
        """As Hugging Face's decode(..., skip_special_tokens=True), which published truncations use.

        The space that some tokenizers put before every text is removed, also from the second half of a cut text.
        """
        tokens = tokens[1:] if list(tokens[:1]) == [self.llm.token_bos()] else tokens  # else the space would stay
        return detokenize(self.llm, tokens).decode("utf-8", "replace")
