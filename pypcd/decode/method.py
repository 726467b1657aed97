"""A decoding method: an edit of the prompt, a source of rows (logits), and a search that chooses tokens from them."""

from __future__ import annotations

import codecs
import dataclasses
import time
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pypcd.decode.cache import KVTypes
from pypcd.decode.rows import Plain, RowSource
from pypcd.decode.search import Greedy, Look, Search
from pypcd.decode.session import Logits, Session
from pypcd.engine import PCDAnswer, is_recurrent, pcd, token_bytes
from pypcd.errors import ArgumentError, PCDError, UnsupportedError
from pypcd.find import Found
from pypcd.prompt import AnyPrompt, Laid, Messages, Prompt, has_template, lay
from pypcd.settings.ranges import Integer

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["Answer", "Answering", "Edit", "Edited", "Method", "Writing", "fitted"]


class Answering(Protocol):
    """Answers a prompt, by the same method without its edit; in as many tokens as the method's answer has, or max_tokens."""

    def __call__(self, prompt: AnyPrompt, max_tokens: int | None = None) -> str: ...


class Edited(NamedTuple):
    """A prompt that was changed.

    Attributes:
        found: the passages that were repeated in it.
    """

    prompt: AnyPrompt
    found: Found = Found()


def fitted(llm: Any, given: AnyPrompt, edited: Edited, *, chat: bool, n_ctx: int) -> tuple[AnyPrompt, Found, Laid]:
    """An edited prompt, what was found for it, and its tokens; or the given one, if the context has no room for the passages."""
    prompt, found = edited
    laid = lay(llm, prompt.turns, chat=chat, answer_prefix=prompt.answer_prefix)
    if found.passages and len(laid.tokens) + 2 >= n_ctx:
        prompt, found = given, Found(note="nothing was repeated: the context has no room for it")
        laid = lay(llm, prompt.turns, chat=chat, answer_prefix=prompt.answer_prefix)
    return prompt, found, laid


class Edit(Protocol):
    """Changes a prompt before it is answered; one of several messages (Messages) only if its attribute `in_conversations` is true."""

    def edit(self, session: Session, prompt: Any, *, chat: bool, answer: Answering) -> Edited: ...


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
        found: the passages that were repeated, if the method repeats any.
        end: what ended it: "stop", the model or a text; "length", max_tokens; "context", which is full; or "interrupted".
        prompt_seconds: of the time, up to the first token.
        n_ended: 1 if the model itself ended it, with a token that is not among `tokens`; else 0.
    """

    text: str
    tokens: tuple[int, ...]
    n_prompt: int
    n_evaluated: int
    seconds: float
    pcd: PCDAnswer | None = None
    found: Found = dataclasses.field(default_factory=Found)
    end: str = "stop"
    prompt_seconds: float = 0.0
    n_ended: int = 0


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

    def generate(self, model: Llama | Session, prompt: AnyPrompt | str, **how: Any) -> Answer:
        """Answer a prompt. The arguments and errors are stream()'s."""
        writing = self.stream(model, prompt, **how)
        for _ in writing:
            pass
        return writing.answer

    def stream(
        self,
        model: Llama | Session,
        prompt: AnyPrompt | Laid | str,
        *,
        max_tokens: int = 64,
        stop: str | Sequence[str] | None = (),
        chat: bool = False,
        look: Look = lambda token, row: None,
    ) -> Writing:
        """Answer a prompt, piece by piece.

        Args:
            model: a model, or a session on one; methods share the session's evaluated prompt where they can.
            prompt: a text is a prompt without parts; methods that need its context reject that. A prompt's tokens (Laid) are taken as they
                are, and no method edits them.
            max_tokens: at most so many; 0: until the context is full.
            stop: texts that end the answer and are no part of it, besides the template's; else only the model's own end does. White space
                before the answer does not count.
            chat: use the model's chat template.
            look: called with each chosen token and the row it was chosen from, float32[n_vocab]; not by beam search.

        Raises:
            UnsupportedError: this model cannot run this method.
            ValueError: the prompt is empty or does not fit, max_tokens is less than 0, or stop has what is no text.
        """
        Integer(0)("max_tokens", max_tokens)
        session = model if isinstance(model, Session) else Session(model)
        prompt = Prompt(after=prompt) if isinstance(prompt, str) else prompt
        if isinstance(prompt, Messages) and not (
            self.rows.in_conversations and getattr(self.edit, "in_conversations", self.edit is None)
        ):
            raise UnsupportedError(
                f"{self.name} answers a question by itself, not one behind other messages, such as the system's; ask it alone"
            )
        if (self, chat) not in session.refusals:  # trying a setting may take memory and time
            session.refusals[self, chat] = self.refusal(session.llm, chat=chat)
        if refusal := session.refusals[self, chat]:
            raise UnsupportedError(f"{self.name} cannot run on this model: {refusal}")
        stops = tuple(filter(None, (stop,) if isinstance(stop, str) else stop or ()))
        if wrong := [one for one in stops if not isinstance(one, str)]:
            raise ArgumentError(f"stop has {wrong[0]!r}; allowed: texts")
        return Writing(self, session, prompt, max_tokens, stops, chat, look)


@dataclasses.dataclass(eq=False)
class Writing:
    """An answer while it is written: iterate over the pieces of its text. The fields are those of Method.stream()."""

    method: Method
    session: Session
    prompt: AnyPrompt | Laid
    max_tokens: int
    stop: tuple[str, ...]
    chat: bool
    look: Look

    def __post_init__(self) -> None:
        rows = self.method.rows
        self._did = PCDAnswer(rows.pcd) if rows.pcd and self.method.search.n_sequences == 1 else None
        self._laid, self._found = Laid([], [], None, 0, []), Found()
        self._tokens: list[int] = []
        self._text, self._end, self._n_ended = "", "interrupted", 0
        self._before, self._seconds, self._first = self.session.n_evaluated, 0.0, 0.0
        self._pieces = self._write()

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def close(self) -> None:
        """End it here."""
        self._pieces.close()

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        n_prompt = len(self._laid.tokens)
        return Answer(
            self._text,
            tuple(self._tokens),
            n_prompt,
            self.session.n_evaluated - self._before,
            self._seconds,
            self._did and dataclasses.replace(self._did, n_prompt=n_prompt),
            self._found,
            self._end,
            self._first or self._seconds,
            self._n_ended,
        )

    def _write(self) -> Generator[str, None, None]:
        session, llm, start = self.session, self.session.llm, time.perf_counter()
        self._before = session.n_evaluated
        data, n_shown, decoder = b"", 0, codecs.getincrementaldecoder("utf-8")("replace")
        try:
            for token in self._chosen():
                self._seconds = time.perf_counter() - start
                self._first = self._first or self._seconds
                self._tokens.append(token)
                data += token_bytes(llm, token)
                if (at := _place(data, self.stop)) is not None:
                    data, self._end = data[:at], "stop"
                    break
                n_ready = len(data) - _n_held(data, self.stop)
                piece, n_shown = decoder.decode(data[n_shown:n_ready]), n_ready
                if piece:
                    self._text += piece
                    yield piece
            else:
                is_cut = self.max_tokens and len(self._tokens) >= self.max_tokens
                self._end = "stop" if self._n_ended else "length" if is_cut else "context"
            piece = decoder.decode(data[n_shown:], final=True)
            self._text += piece
            if piece:
                yield piece
        except RuntimeError as error:
            raise error if isinstance(error, PCDError) else PCDError(str(error)) from error
        finally:
            self._seconds = time.perf_counter() - start
            session.finish()
            n_tokens = len(self._tokens) + self._n_ended
            llm._answer = self.answer.pcd or PCDAnswer(n_tokens=n_tokens, n_prompt=len(self._laid.tokens))

    def _chosen(self) -> Iterator[int]:
        """Edit and evaluate the prompt, and choose the answer's tokens."""
        session, method = self.session, self.method
        prompt = self._edited()
        session.n_text = self._laid.n_text
        room = session.llm.n_ctx() - len(self._laid.tokens)
        rows = method.rows.open(session, prompt, self._laid.tokens, chat=self.chat)
        return method.search.run(rows, min(self.max_tokens or room, room), session.is_end, self._watch, self._is_over)

    def _edited(self) -> Any:
        """The prompt as it is answered, whose tokens are in `_laid` from now on."""
        if isinstance(self.prompt, Laid):
            self._laid = self.prompt
            return self.prompt
        edited = Edited(self.prompt)
        if edit := self.method.edit:
            plain = dataclasses.replace(self.method, edit=None)

            def answer(prompt: AnyPrompt, max_tokens: int | None = None) -> str:
                how = {"max_tokens": max_tokens or self.max_tokens, "chat": self.chat}
                return plain.generate(self.session, prompt, **how).text

            edited = edit.edit(self.session, self.prompt, chat=self.chat, answer=answer)
        llm = self.session.llm
        prompt, self._found, self._laid = fitted(llm, self.prompt, edited, chat=self.chat, n_ctx=llm.n_ctx())
        self.stop += tuple(filter(None, self._laid.stop))
        return prompt

    def _watch(self, token: int, row: Logits) -> None:
        if self._did is not None:
            self._did = self._did.with_token(token, pcd(self.session.llm).logits(-1))
        self._n_ended = int(self.session.is_end(token))
        self.look(token, row)

    def _is_over(self, tokens: Sequence[int]) -> bool:
        return _place(b"".join(token_bytes(self.session.llm, token) for token in tokens), self.stop) is not None


def _place(text: bytes, stop: Sequence[str]) -> int | None:
    """Where a text that ends an answer begins in it, after the white space before the answer; None if none occurs."""
    places = [text.find(one.encode(), len(text) - len(text.lstrip())) for one in stop]
    return min((at for at in places if at >= 0), default=None)


def _n_held(text: bytes, stop: Sequence[str]) -> int:
    """How many bytes at the end of a text may begin one that ends it."""
    ends = [one.encode() for one in stop]
    return max((n for one in ends for n in range(1, len(one)) if text.endswith(one[:n])), default=0)
