"""A long prompt in its parts, and its tokens: as plain text or through the model's chat template."""

from __future__ import annotations

import abc
import bisect
import dataclasses
import itertools
import re
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pypcd.engine import is_defined, token_bytes, token_text  # first: it reports a wrong or missing library

# isort: split
from llama_cpp import llama_chat_format

from pypcd.errors import PCDError
from pypcd.llama import templates

__all__ = [
    "AnyPrompt",
    "Elsewhere",
    "Laid",
    "Messages",
    "Piece",
    "Prompt",
    "Turn",
    "chat_formatter",
    "has_template",
    "lay",
    "prompt_tokens",
]


class Piece(NamedTuple):
    """A part of a message.

    Attributes:
        kind: "segment", a part of a text that the question is about; "question"; or "", neither.
    """

    text: str
    kind: str = ""


Turn = tuple[str, tuple[Piece, ...]]  # "system", "user" or "assistant", and the message


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

    earlier = ""  # as Messages.earlier: no question comes before this one

    @property
    def context(self) -> str:
        return self.joiner.join(self.segments)

    @property
    def text(self) -> str:
        """The question as one text, without shots and answer prefix."""
        return self.before + self.context + self.after

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Questions with answers, and last the question without one: what a chat template gets."""
        text = [Piece(self.before)]
        for i, segment in enumerate(self.segments):
            text += [Piece(self.joiner)] * bool(i) + [Piece(segment, "segment")]
        asked = Piece(self.after, "question")
        turns: list[Turn] = []
        for i, (question, answer) in enumerate(self.shots):
            begin = text if self.text_first and i == 0 else []
            turns += [("user", (*begin, Piece(question))), ("assistant", (Piece(answer),))]
        return (*turns, ("user", (asked,) if self.text_first and self.shots else (*text, asked)))

    @property
    def whole(self) -> str:
        """All of it as one text, without the answer prefix."""
        return "".join(piece.text for piece in _without_template(self.turns))

    @property
    def begun(self) -> str:
        """The same with the answer prefix: what a model goes on from."""
        return self.whole + self.answer_prefix

    def replace(self, **changes: Any) -> Prompt:
        return dataclasses.replace(self, **changes)

    def with_passages(self, passages: Sequence[str]) -> Prompt:
        """The same with passages of the context between it and the question."""
        return self.replace(after="\n\n" + _repeated(passages) + self.after.lstrip("\n"))


@dataclasses.dataclass(frozen=True)
class Messages:
    """A conversation, whose last message is the user's."""

    turns: tuple[Turn, ...]
    answer_prefix = ""

    @property
    def earlier(self) -> str:
        """The question before the last one, which that may go on from ("and the second one?"); empty: there is none."""
        asked = [piece.text for _, message in self.turns for piece in message if piece.kind == "question"]
        return asked[-2] if len(asked) > 1 else ""

    def with_passages(self, passages: Sequence[str]) -> Messages:
        """The same with passages of the texts before the last question."""
        *others, (role, message) = self.turns
        pieces: list[Piece] = []
        for piece in message:
            if piece.kind == "question":
                gap = "\n\n" if piece.text.startswith("\n") else ""
                pieces.append(Piece(gap + _repeated(passages)))
                piece = piece._replace(text=piece.text.lstrip("\n"))
            pieces.append(piece)
        return Messages((*others, (role, tuple(pieces))))


AnyPrompt = Prompt | Messages


def _repeated(passages: Sequence[str]) -> str:
    """How passages are written before a question. Small models copy some other headings into their answers, and go on with passages that
    have none (scripts/recipes/replay_words.py in commit 7d6ac68: 56 of 80 answers copied one)."""
    return "".join(f"{text}\n\n" for text in ("From the text above:", *passages))


@dataclasses.dataclass(frozen=True)
class Laid:
    """A prompt's tokens, and where its parts are in them.

    Attributes:
        tokens: ids.
        segments: of each segment the index of its first token, and one past its last; a token across a border counts for both. Empty
            if the model's tokenizer changes the text, so that nobody can tell.
        question: the same of the last question; None: there is none, or nobody can tell.
        n_text: how many tokens are whole before the end of the last segment, of those before the first question about them; 0: there is
            none, or nobody can tell. Prompts that differ behind it have these in common.
        stop: texts that end an answer.
    """

    tokens: list[int]
    segments: list[tuple[int, int]]
    question: tuple[int, int] | None
    n_text: int
    stop: list[str]


class Elsewhere(abc.ABC):
    """A model of another process, in the place of a Llama: beside its tokenize(), token_bos() and metadata, all that a prompt needs of one."""

    @abc.abstractmethod
    def pieces(self, tokens: Sequence[int]) -> Iterable[tuple[bytes, str, bool]]:
        """Of each token what engine.token_bytes, engine.token_text and engine.is_defined give."""

    @abc.abstractmethod
    def render(self, messages: list[Any]) -> llama_chat_format.ChatFormatterResponse: ...


# of each model: the texts of the tokens that were seen, the marks in its template, and the prompts that were laid last
_PIECES: weakref.WeakKeyDictionary[Any, dict[int, tuple[bytes, bytes, bool]]] = weakref.WeakKeyDictionary()
_MARKS: weakref.WeakKeyDictionary[Any, frozenset[bytes]] = weakref.WeakKeyDictionary()
_LAID: weakref.WeakKeyDictionary[Any, dict[Any, Laid]] = weakref.WeakKeyDictionary()
_N_LAID = (
    4  # a question is laid by itself, by other methods, and with its passages; in a context of 32k each takes a second
)


def _pieces(llm: Any, tokens: Sequence[int]) -> list[tuple[bytes, bytes, bool]]:
    """Of each token its text, which is empty for a control token, the letters of that, and whether it is a mark: no control token, but read
    wherever they stand, such as DeepSeek's <｜User｜>."""
    known = _PIECES.setdefault(llm, {})
    if new := sorted(set(tokens) - known.keys()):
        told = (
            llm.pieces(new)
            if isinstance(llm, Elsewhere)
            else ((token_bytes(llm, token), token_text(llm, token), is_defined(llm, token)) for token in new)
        )
        for token, (text, letters, is_read) in zip(new, told):
            known[token] = text, letters.encode(), is_read and bool(_MARK.fullmatch(letters))
    return [known[token] for token in tokens]


def lay(llm: Any, turns: Sequence[Turn], *, chat: bool, answer_prefix: str = "") -> Laid:
    """The tokens of messages, ready for the next answer.

    What stands in a message is text: a control token's letters in it, such as <|im_end|>, are letters.

    Args:
        chat: through the model's chat template, which may leave later system messages out; else one behind the other.

    Raises:
        PCDError: with chat, the model has no template, or it is broken, or does not take these messages.
    """
    if isinstance(llm, Elsewhere):  # whose messages may have more than text
        return _laid(llm, turns, chat, answer_prefix)
    kept, key = _LAID.setdefault(llm, {}), (tuple(turns), chat, answer_prefix)
    found = kept.pop(key, None) or _laid(llm, turns, chat, answer_prefix)
    kept[key] = found
    if len(kept) > _N_LAID:
        del kept[next(iter(kept))]
    return dataclasses.replace(found, tokens=list(found.tokens))  # which callers may change


def _laid(llm: Any, turns: Sequence[Turn], chat: bool, answer_prefix: str) -> Laid:
    if chat:
        parts, has_bos, stop = _rendered(llm, turns)
    else:
        parts = [Piece(_storable(text), kind or "text") for text, kind in _without_template(turns)]
        has_bos, stop = False, []
    # as an answer, it ends before the space that the next token begins with
    parts.append(Piece(_storable(answer_prefix.rstrip() if chat else answer_prefix), "" if chat else "text"))
    tokens, ends = _tokens(llm, parts, not has_bos)
    if not ends:
        return Laid(tokens, [], None, 0, stop)
    spans: list[tuple[str, int, int]] = []
    at, n_text, is_asked = 0, 0, False
    for part in parts:
        last = at + len(part.text.encode())
        first = bisect.bisect_right(ends, at)
        spans.append((part.kind, first, bisect.bisect_right(ends, last - 1) + 1 if last > at else first))
        if part.kind == "segment" and not is_asked:
            n_text = bisect.bisect_right(ends, last)
        is_asked = is_asked or (part.kind == "question" and n_text > 0)
        at = last
    segments = [(first, last) for kind, first, last in spans if kind == "segment"]
    asked = [(first, last) for kind, first, last in spans if kind == "question" and last > first]
    return Laid(tokens, segments, asked[-1] if asked else None, n_text, stop)


def prompt_tokens(llm: Any, prompt: Prompt, *, chat: bool = False) -> list[int]:
    """The tokens of a prompt.

    Args:
        chat: through the model's chat template, followed by the answer prefix; else as plain text.
    """
    return lay(llm, prompt.turns, chat=chat, answer_prefix=prompt.answer_prefix).tokens


def has_template(llm: Any) -> bool:
    return templates.KEY in llm.metadata


def chat_formatter(llm: Any) -> Any:
    if not has_template(llm):
        raise PCDError("this model has no chat template; use it without chat")
    bos, eos = (token_text(llm, t) for t in (llm.token_bos(), llm.token_eos()))
    return templates.formatter(llm.metadata[templates.KEY], bos=bos, eos=eos)


def _text(turn: Turn) -> str:
    return "".join(piece.text for piece in turn[1])


def _without_template(turns: Sequence[Turn]) -> list[Piece]:
    """The pieces of messages one behind the other, an answer with an empty line behind it."""
    return [piece for role, message in turns for piece in (*message, *([Piece("\n\n")] if role == "assistant" else []))]


def _storable(text: str) -> str:
    """The text as UTF-8 can hold it."""
    return text.encode("utf-8", "replace").decode()


_SPACE: Any = re.compile(rb"\s*")
_MARK = re.compile(r"[^\w\s].*\w.*[^\w\s]")  # no word, which a vocabulary may have such tokens for too
_EDGE = "\x0b"  # white space that a template takes away if it strips its messages


def _rendered(llm: Any, turns: Sequence[Turn]) -> tuple[list[Piece], bool, list[str]]:
    """What the chat template makes of messages, the template's own text as pieces of kind "" and the rest of kind "text" unless it has
    one; whether a beginning-of-text token is in it; and the texts that end an answer.

    The template gets a mark for each message, and the message takes its place afterwards. So its pieces are known by their places, and no
    letters in them are taken for the template's. An answer gets one only if it has such letters: templates leave thoughts out of others.
    """
    marks = {
        i: f"pcd{secrets.token_hex(8)}"
        for i, turn in enumerate(turns)
        if turn[0] != "assistant"
        or _n_control(llm, llm.tokenize(_storable(_text(turn)).encode(), add_bos=False, special=True))
    }
    render, problem = llm.render if isinstance(llm, Elsewhere) else chat_formatter(llm), ""
    cause: Exception | None = None
    made: Any = None
    # some templates take parts alone
    for wrapped in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        messages = [
            {"role": turn[0], "content": wrapped(_EDGE + marks[i] + _EDGE if i in marks else _text(turn).lstrip(" "))}
            for i, turn in enumerate(turns)
        ]
        try:
            made = render(messages=messages)
        except PCDError:
            raise  # of another process
        except Exception as error:  # noqa: BLE001  any: a template is a program
            problem, cause = problem or f"rejects these messages: {error}", cause or error
            continue
        if all(made.prompt.count(mark) in (0, 1)[turns[i][0] == "user" :] for i, mark in marks.items()):
            break
        problem = problem or "leaves a message of the user's out, or writes one twice; use it without chat"
    else:
        made = None
    if turns[0][0] == "system" and turns[1:] and not (made and marks[0] in made.prompt):
        (_, system), (role, message), *others = (
            turns  # it has no place for the first one: llama.cpp puts that into the next
        )
        return _rendered(llm, [(role, (*system, Piece("\n"), *message)), *others])
    if made is None:
        raise PCDError(f"the model's chat template {problem}") from cause
    parts, rest = list[Piece](), made.prompt
    for i, mark in sorted(marks.items(), key=lambda pair: made.prompt.find(pair[1])):
        before, found, behind = rest.partition(mark)
        if not found:
            continue  # a later system message that the template has no place for
        is_kept = before.endswith(_EDGE) and behind.startswith(_EDGE)
        parts.append(Piece(before.removesuffix(_EDGE)))
        parts += [piece._replace(kind=piece.kind or "text") for piece in _message(turns[i], stripped=not is_kept)]
        rest = behind.removeprefix(_EDGE)
    stop = [made.stop] if isinstance(made.stop, str) else made.stop or []
    return [*parts, Piece(rest)], bool(made.added_special), stop


def _message(turn: Turn, *, stripped: bool) -> list[Piece]:
    pieces = [piece._replace(text=_storable(piece.text)) for piece in turn[1] if piece.text]
    if stripped and pieces:
        pieces[0] = pieces[0]._replace(text=pieces[0].text.lstrip())
        pieces[-1] = pieces[-1]._replace(text=pieces[-1].text.rstrip())
    return pieces


def _tokens(llm: Any, parts: Sequence[Piece], add_bos: bool) -> tuple[list[int], list[int]]:
    """The tokens of pieces, where control tokens are read in those of kind "" alone; and how many bytes of the text each token and those
    before it have; none of these if the tokenizer changes the text."""
    is_plain = all(part.kind for part in parts)
    text = "".join(part.text for part in parts).encode()
    tokens = llm.tokenize(text, add_bos=add_bos, special=not is_plain)
    ends, cuts = _ends(llm, tokens, text), [] if is_plain else _cuts(llm, parts, text)
    if not is_plain and ends:
        tokens, ends = _apart(llm, parts, tokens, ends, text, cuts, add_bos)
    elif not is_plain:
        apart, at = list[int](), 0
        for is_text, run in itertools.groupby(parts, lambda part: bool(part.kind)):
            begin, at = at, at + sum(len(part.text.encode()) for part in run)
            for i, j in itertools.pairwise([begin, *(cut for cut in cuts if begin < cut < at), at]):
                apart += llm.tokenize(text[i:j], add_bos=add_bos and not i, special=not is_text)
        tokens = apart if cuts or _n_control(llm, apart) < _n_control(llm, tokens) else tokens
    if tokens[:2] == [llm.token_bos()] * 2:
        tokens, ends = tokens[1:], ends[1:]
    return tokens, ends


def _cuts(llm: Any, parts: Sequence[Piece], text: bytes) -> list[int]:
    """Where a text is read in two, so that a message opens no role's turn: behind the first letter of each of the template's marks in it."""
    if llm not in _MARKS:  # with other roles'
        _MARKS[llm] = _marks(llm, llm.metadata.get(templates.KEY, ""))
    marks = _MARKS[llm].union(*(_marks(llm, part.text) for part in parts if part.text and not part.kind))
    borders, cuts = [0, *itertools.accumulate(len(part.text.encode()) for part in parts)], list[int]()
    any_mark = b"|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    for found in re.finditer(any_mark, text) if marks else ():
        at = bisect.bisect_right(borders, found.start()) - 1
        if parts[at].kind or found.end() > borders[at + 1]:
            cuts.append(found.start() + len(found[0].decode()[0].encode()))
    return cuts


def _marks(llm: Any, text: str) -> frozenset[bytes]:
    made = _pieces(llm, llm.tokenize(text.encode(), add_bos=False, special=True))
    return frozenset(letters for _, letters, is_mark in made if is_mark)


def _apart(
    llm: Any,
    parts: Sequence[Piece],
    tokens: list[int],
    ends: list[int],
    text: bytes,
    cuts: Sequence[int],
    add_bos: bool,
) -> tuple[list[int], list[int]]:
    """The tokens and ends, with letters for the control tokens that are not wholly in a piece without a kind: the text between two of the
    others is tokenised as llama.cpp does it, but without control tokens."""
    borders = [0, *itertools.accumulate(len(part.text.encode()) for part in parts)]
    own, n_foreign = list[tuple[int, int, int]](), 0
    for token, end, (shown, letters, _) in zip(tokens, ends, _pieces(llm, tokens)):
        begin = end - len(letters)
        if letters and not shown and begin >= 0 and text[begin:end] == letters:
            at = bisect.bisect_right(borders, begin) - 1
            if parts[at].kind or end > borders[at + 1]:
                n_foreign += 1
            else:
                own.append((token, begin, end))
    if not n_foreign and not cuts:
        return tokens, ends
    made, done = list[int](), 0
    for token, begin, end in [*own, (-1, len(text), len(text))]:
        for i, j in itertools.pairwise([done, *(cut for cut in cuts if done < cut < begin), begin]):
            made += llm.tokenize(text[i:j], add_bos=add_bos and not i, special=False)
        made.append(token)
        done = end
    made.pop()
    return made, _ends(llm, made, text)


def _n_control(llm: Any, tokens: Sequence[int]) -> int:
    return sum(not shown for shown, *_ in _pieces(llm, tokens))


def _ends(llm: Any, tokens: Sequence[int], text: bytes) -> list[int]:
    """How many bytes of a text each token and those before it have. A space may have been put before it and behind control tokens, and white
    space beside these taken away. Empty: something else was changed."""
    made = _pieces(llm, tokens)
    for before in (b"", b" "):
        ends, at, is_first = list[int](), 0, True
        for letters, control, _ in made:
            if letters:
                if is_first and not letters.startswith(before):
                    break
                letters = letters[len(before) if is_first else 0 :]
                if is_first and not text.startswith(letters, at):
                    at = _SPACE.match(text, at).end()
                if not text.startswith(letters, at):
                    break
                at, is_first = at + len(letters), False
            else:
                behind = _SPACE.match(text, at).end()
                at = next((i + len(control) for i in (at, behind) if text.startswith(control, i)), at)
                is_first = True  # one that is not in the text begins or ends it
            ends.append(at)
        if len(ends) == len(tokens) and not text[at:].strip():
            return ends
    return []
