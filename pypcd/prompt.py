"""A long prompt in its parts, and its tokens: as plain text or through the model's chat template."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pypcd.engine import token_bytes, token_text  # first: it reports a wrong or missing library

# isort: split
import jinja2
import numpy as np
import numpy.typing as npt
from llama_cpp import llama_chat_format

from pypcd.errors import PCDError

__all__ = [
    "Prompt",
    "chat_formatter",
    "chat_tokens",
    "find_texts",
    "has_template",
    "n_tokens_through",
    "prompt_tokens",
    "split_context",
]


LONGEST_PART = 1200  # characters: some 250 tokens of English


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt in parts, so that a method can reorder the context or leave it out.

    Attributes:
        before: the instruction before the context.
        segments: the context, in parts that may be reordered.
        joiner: the text between two segments.
        after: the text after the context: the question.
        answer_prefix: the beginning of the answer, given to the model.
        shots: example questions with their answers. They stand before all else, in turns of their own.
        text_first: whether the context stands before the shots: then it is no part of the question, but of the first turn.
    """

    before: str = ""
    segments: tuple[str, ...] = ()
    joiner: str = ""
    after: str = ""
    answer_prefix: str = ""
    shots: tuple[tuple[str, str], ...] = ()
    text_first: bool = False

    @property
    def context(self) -> str:
        return self.joiner.join(self.segments)

    @property
    def text(self) -> str:
        """The question as one text, without shots and answer prefix."""
        return self.before + self.context + self.after

    @property
    def turns(self) -> tuple[tuple[str, str], ...]:
        """Questions with answers, and last the question without one: what a chat template gets."""
        if not (self.text_first and self.shots):
            return (*self.shots, (self.text, ""))
        (question, answer), *others = self.shots
        return (f"{self.before}{self.context}{question}", answer), *others, (self.after, "")

    @property
    def whole(self) -> str:
        """All of it as one text, without the answer prefix."""
        *shots, (asked, _) = self.turns
        return "".join(f"{question}{answer}\n\n" for question, answer in shots) + asked

    def replace(self, **changes: Any) -> Prompt:
        return dataclasses.replace(self, **changes)


def split_context(text: str) -> tuple[tuple[str, ...], str]:
    """A text's parts and the text that joins them: its paragraphs, lines or sentences. The first of these counts whose parts have at most
    LONGEST_PART characters; if none has, the one whose longest part is shortest."""
    found: tuple[tuple[str, ...], str] = ((text,), "")
    for joiner in ("\n\n", "\n", ". "):
        parts = tuple(text.split(joiner))
        if _longest(parts) < _longest(found[0]):
            found = parts, joiner
        if len(found[0]) > 1 and _longest(found[0]) <= LONGEST_PART:
            break
    return found


def _longest(parts: Sequence[str]) -> int:
    return max(map(len, parts))


def prompt_tokens(llm: Any, prompt: Prompt, *, chat: bool = False) -> list[int]:
    """The tokens of a prompt.

    Args:
        chat: through the model's chat template, followed by the answer prefix; else as plain text.

    Raises:
        PCDError: with chat, the model has no template or it refuses the messages.
    """
    if not chat:
        return llm.tokenize((prompt.whole + prompt.answer_prefix).encode("utf-8", "replace"), special=False)
    if not has_template(llm):
        raise PCDError("this model has no chat template; use it without chat")
    messages = []
    *shots, (asked, _) = prompt.turns
    for question, answer in shots:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.lstrip()}]
    return chat_tokens(llm, [*messages, {"role": "user", "content": asked}], prompt.answer_prefix)[0]


def chat_tokens(llm: Any, messages: Sequence[Any], answer_prefix: str = "") -> tuple[list[int], list[str]]:
    """The tokens of a conversation, ready for its next answer, and the texts that end an answer.

    Raises:
        PCDError: the model's chat template is broken, or rejects these messages.
    """
    try:
        made = chat_formatter(llm)(messages=list(messages))
    except (jinja2.TemplateError, ValueError) as error:
        raise PCDError(f"the model's chat template rejects these messages: {error}") from error
    text = (made.prompt + answer_prefix).encode("utf-8", "replace")
    tokens = llm.tokenize(text, add_bos=not made.added_special, special=True)
    if tokens[:2] == [llm.token_bos()] * 2:
        tokens = tokens[1:]
    return tokens, [made.stop] if isinstance(made.stop, str) else made.stop or []


def find_texts(llm: Any, tokens: Sequence[int], texts: Sequence[str]) -> tuple[npt.NDArray[np.int64], list[int]]:
    """Where texts stand in a prompt: the byte at which each of its tokens ends, and the byte at which each text begins; -1: not as it is.

    Each is looked for behind the one before it: what comes later, such as a question, may quote them.
    """
    parts = [token_bytes(llm, token) for token in tokens]
    whole, begins, behind = b"".join(parts), list[int](), 0
    for text in texts:
        data = text.encode()
        at = whole.find(data, behind)
        begins.append(at if at >= 0 else whole.find(data))
        behind = begins[-1] + len(data) if begins[-1] >= 0 else behind
    return np.cumsum([len(part) for part in parts], dtype=np.int64), begins


def n_tokens_through(llm: Any, tokens: Sequence[int], texts: Sequence[str]) -> int:
    """How many tokens of a prompt it takes to the end of the last of some texts in it, without one that goes beyond; 0 if one of them
    is not there as it is."""
    ends, begins = find_texts(llm, tokens, texts)
    if min(begins) < 0:
        return 0
    last = max(begin + len(text.encode()) for begin, text in zip(begins, texts))
    return int(np.searchsorted(ends, last, side="right"))


def has_template(llm: Any) -> bool:
    return "tokenizer.chat_template" in llm.metadata


def chat_formatter(llm: Any) -> Any:
    if not has_template(llm):
        return llama_chat_format.format_llama2  # what llama_cpp falls back to
    bos, eos = (token_text(llm, t) for t in (llm.token_bos(), llm.token_eos()))
    try:
        return llama_chat_format.Jinja2ChatFormatter(
            llm.metadata["tokenizer.chat_template"], eos_token=eos, bos_token=bos
        )
    except jinja2.TemplateError as error:
        raise PCDError(f"the model's chat template is broken: {error}") from error
