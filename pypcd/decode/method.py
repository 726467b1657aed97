"""A decoding method: an edit of the prompt, a source of rows (logits), and a search that chooses tokens from them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from pypcd.decode.cache import KVTypes
from pypcd.decode.rows import Constrained, Plain, RowSource
from pypcd.decode.search import Greedy, Search
from pypcd.decode.session import Logits, Session
from pypcd.engine import PCDAnswer, is_recurrent, pcd, token_bytes
from pypcd.errors import PCDError, UnsupportedError
from pypcd.prompt import Prompt, has_template, prompt_tokens
from pypcd.settings.ranges import Integer

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["Answer", "Answering", "Edit", "Method"]


class Answering(Protocol):
    """Answers a prompt, by the same method without its edit; in as many tokens as the method's answer has, or max_tokens."""

    def __call__(self, prompt: Prompt, max_tokens: int | None = None) -> str: ...


class Edit(Protocol):
    """Changes a prompt before it is answered."""

    def edit(self, session: Session, prompt: Prompt, *, chat: bool, answer: Answering) -> Prompt: ...


@dataclasses.dataclass(frozen=True)
class Answer:
    """A method's answer.

    Attributes:
        text: without the prompt and its answer prefix, up to the text that ends it (`stop`).
        tokens: ids, without the end-of-generation token; the last may be the one that has the text that ends it.
        n_prompt: number of tokens of the prompt that was answered.
        n_evaluated: prompt tokens evaluated for it; less than n_prompt if the prompt was in the cache.
        seconds: time for everything.
        pcd: what PCD did to it, if the method contrasts by PCD and writes one answer at a time.
    """

    text: str
    tokens: tuple[int, ...]
    n_prompt: int
    n_evaluated: int
    seconds: float
    pcd: PCDAnswer | None = None


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to answer a prompt.

    Args:
        name: a name that parse() reads.
        rows: where the logits come from.
        search: how tokens are chosen from them.
        edit: how the prompt is changed first; None leaves it.
        cache: the types of keys and values; None: whatever the context has.
    """

    name: str
    rows: RowSource = dataclasses.field(default_factory=Plain)
    search: Search = dataclasses.field(default_factory=Greedy)
    edit: Edit | None = None
    cache: KVTypes | None = None

    @property
    def n_sequences(self) -> int:
        """How many sequences a context must have: pypcd.Llama's n_seq_max."""
        return self.search.n_sequences * self.rows.n_sequences

    @property
    def n_added(self) -> int:
        """How many tokens of text its edit may add to a prompt, besides words of its own."""
        return int(getattr(self.edit, "n_tokens", 0))

    def with_pool(self, prompts: tuple[Prompt, ...]) -> Method:
        """The same method with a pool: other prompts of the same kind, which some rows (control) are made from."""
        return dataclasses.replace(self, rows=self.rows.with_pool(prompts))

    def refusal(self, llm: Llama, *, chat: bool = False) -> str | None:
        """Why a model cannot run this method, in a sentence; None if it can."""
        if chat and not has_template(llm):
            return "it has no chat template"
        if self.search.n_sequences > 1 and not self.rows.forks:
            return "its logits exist for one answer at a time, but the search needs several at once"
        if self.n_sequences > 1 and is_recurrent(llm):
            return "the model has a recurrent state for one sequence, but this needs several"
        if self.n_sequences > llm.n_seq_max:
            return f"it needs {self.n_sequences} sequences, the context has {llm.n_seq_max}; load the model with n_seq_max={self.n_sequences}"
        return (self.cache and self.cache.refusal(llm)) or self.rows.refusal(llm)

    def generate(
        self,
        model: Llama | Session,
        prompt: Prompt | str,
        *,
        max_tokens: int = 64,
        stop: str = "",
        chat: bool = False,
        look: Callable[[int, Logits], None] = lambda token, row: None,
        grammar: str = "",
    ) -> Answer:
        """Answer a prompt.

        Args:
            model: a model, or a session on one; methods share the session's evaluated prompt where they can.
            prompt: a text is a prompt without parts; methods that need its context reject that.
            stop: a text that ends the answer and is no part of it; "": only the model's own end does. White space before
                the answer does not count.
            chat: use the model's chat template.
            look: called with each chosen token and the row it was chosen from, float32[n_vocab]; not by beam search.
            grammar: which answers are possible, in llama.cpp's GBNF; "": all are. It masks the rows, after any contrast.

        Raises:
            UnsupportedError: this model cannot run this method, or a grammar is given to one that writes several answers.
            ValueError: the prompt is empty or does not fit, max_tokens is less than 1, or llama.cpp cannot read the grammar.
        """
        Integer(1)("max_tokens", max_tokens)
        session = model if isinstance(model, Session) else Session(model)
        prompt = Prompt(after=prompt) if isinstance(prompt, str) else prompt
        key = (self, chat)
        if key not in session.refusals:  # trying a setting may take memory and time
            session.refusals[key] = self.refusal(session.llm, chat=chat)
        refusal = session.refusals[key]
        if refusal is not None:
            raise UnsupportedError(f"{self.name} cannot run on this model: {refusal}")
        if grammar and self.search.n_sequences > 1:
            raise UnsupportedError(f"{self.name} cannot run under a grammar, which follows one answer at a time")

        before, start = session.n_evaluated, time.perf_counter()
        plain, longest = dataclasses.replace(self, edit=None), max_tokens

        def answer(prompt: Prompt, max_tokens: int | None = None) -> str:
            return plain.generate(session, prompt, max_tokens=max_tokens or longest, chat=chat).text

        def text_of(tokens: Sequence[int]) -> bytes:
            return b"".join(token_bytes(session.llm, token) for token in tokens)

        did = None if self.rows.pcd is None or self.search.n_sequences > 1 else PCDAnswer(self.rows.pcd)

        def watch(token: int, row: Logits) -> None:
            nonlocal did
            if did is not None:
                did = did.with_token(token, pcd(session.llm).logits(-1))
            look(token, row)

        def is_over(tokens: Sequence[int]) -> bool:
            return bool(stop) and _place(text_of(tokens), stop) is not None

        try:
            prompt = self.edit.edit(session, prompt, chat=chat, answer=answer) if self.edit else prompt
            tokens = prompt_tokens(session.llm, prompt, chat=chat)
            room = session.llm.n_ctx() - len(tokens)
            stream = self.rows.open(session, prompt, tokens, chat=chat)
            stream = Constrained(stream, grammar) if grammar else stream
            chosen = self.search.run(stream, min(max_tokens, room), session.is_end, watch, is_over)
        except RuntimeError as error:
            raise error if isinstance(error, PCDError) else PCDError(str(error)) from error
        finally:
            session.finish()
        text = text_of(chosen)
        text = text[: _place(text, stop)]
        seconds = time.perf_counter() - start
        return Answer(
            text.decode("utf-8", "replace"),
            tuple(chosen),
            len(tokens),
            session.n_evaluated - before,
            seconds,
            did and dataclasses.replace(did, n_prompt=len(tokens)),
        )


def _place(text: bytes, stop: str) -> int | None:
    """Where a stop text begins in an answer, after the white space before the answer; None if it does not occur."""
    at = text.find(stop.encode(), len(text) - len(text.lstrip())) if stop else -1
    return None if at < 0 else at
