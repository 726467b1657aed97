"""A prompt's parts, and where they are among its tokens, worked by hand: capitals are tokens of their own to the tiny models."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
from conftest import Load, Tiny

import pypcd
from pypcd.engine import token_bytes
from pypcd.prompt import Laid, Messages, Piece, Prompt, lay

ONE_SPACE = 259  # the token of a space, which the tokenizer puts before every text


def turn(*pieces: tuple[str, str]) -> Any:
    return [("user", tuple(Piece(text, kind) for kind, text in pieces))]


def written(llm: pypcd.Llama, tokens: list[int]) -> str:
    return b"".join(token_bytes(llm, token) for token in tokens).decode()


S, Q, N = "segment", "question", ""


@pytest.mark.parametrize(
    ("pieces", "tokens", "segments", "question", "n_text"),
    [
        ([(S, "AB "), (S, "CD"), (Q, " Q")], "AB_CD_Q", [(2, 5), (5, 7)], (7, 9), 7),
        ([(N, "I"), (S, "A"), (N, ", "), (S, "B"), (N, "?")], "IA,_B?", [(3, 4), (6, 7)], None, 7),
        ([(S, "Xt"), (S, "aYt"), (Q, "aZ")], ["X", "ta", "Y", "ta", "Z"], [(2, 4), (3, 6)], (5, 7), 5),
        ([(S, "ü"), (S, "\ud800"), (Q, "Q")], [b"\xc3", b"\xbc", b"?", b"Q"], [(2, 4), (4, 5)], (5, 6), 5),
        ([(S, "</s>"), (Q, "<s>")], "</s><s>", [(2, 6)], (6, 9), 6),
        ([(S, ""), (Q, "Q")], "Q", [(2, 2)], (2, 3), 2),
        ([(Q, "Q")], "Q", [], (2, 3), 0),
        ([(Q, "Q"), (N, "B"), (Q, "R")], "QBR", [], (4, 5), 0),
    ],
)
def test_where_pieces_are_among_the_tokens(
    pieces: Any, tokens: Any, segments: Any, question: Any, n_text: int, shared: pypcd.Llama
) -> None:
    laid = lay(shared, turn(*pieces), chat=False)
    assert laid == Laid(laid.tokens, segments, question, n_text, [])
    made = [one if isinstance(one, bytes) else one.replace("_", " ").encode() for one in tokens]
    assert laid.tokens[:2] == [shared.token_bos(), ONE_SPACE]
    assert [token_bytes(shared, token) for token in laid.tokens[2:]] == made


def test_a_prompt_is_tokenized_once(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is laid, and whatever is done with what that gives; others are not taken for it."""
    llm, calls = load(tiny("llama"), False), list[bytes]()
    tokenize = llm.tokenize
    monkeypatch.setattr(llm, "tokenize", lambda text, **how: calls.append(text) or tokenize(text, **how))
    one, other = turn((S, "AB"), (Q, "Q")), turn((S, "A"), (S, "B"), (Q, "Q"))
    first = lay(llm, one, chat=False)
    first.tokens.append(7)
    assert lay(llm, one, chat=False) == dataclasses.replace(first, tokens=first.tokens[:-1]) and calls == [b"ABQ"]
    assert lay(llm, other, chat=False).segments == [(2, 3), (3, 4)] and len(calls) == 2
    for i in range(4):
        lay(llm, turn((Q, "Q" * i)), chat=False)
    n = len(calls)
    assert lay(llm, one, chat=False).tokens == first.tokens[:-1] and len(calls) == n + 1, "the oldest were forgotten"


def test_of_a_text_that_the_tokenizer_changes_nobody_can_tell(
    shared: pypcd.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pypcd.prompt._PIECES", weakref.WeakKeyDictionary())  # as of a model that was not asked yet
    monkeypatch.setattr("pypcd.prompt._LAID", weakref.WeakKeyDictionary())
    monkeypatch.setattr("pypcd.prompt.token_bytes", lambda llm, token: token_bytes(llm, token).lower())
    laid = lay(shared, turn((S, "AB"), (Q, "Q")), chat=False)
    assert laid == Laid(laid.tokens, [], None, 0, []) and len(laid.tokens) == 5


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("m.content", "U\n AB Q? Z"),
        ("m.content | trim", "UAB Q?Z"),  # as the template does it
        ("m.content[0].text", "U\n AB Q? Z"),  # which takes lists of parts alone
        ("m.content | map(attribute='text') | join", "U\n AB Q? Z"),  # and finds nothing in a text, without an error
    ],
)
def test_templates_get_the_message_and_may_strip_it(content: str, text: str, tiny: Tiny, load: Load) -> None:
    template = "{% for m in messages %}U{{ " + content + " }}Z{% endfor %}"
    llm = load(tiny("llama", chat_template=template), False)
    laid = lay(llm, turn((S, "\n A"), (S, "B"), (Q, " Q? ")), chat=True)
    assert written(llm, laid.tokens) == " " + text
    parts = [laid.tokens[first:last] for first, last in [*laid.segments, laid.question or (0, 0)]]
    assert [written(llm, part).strip() for part in parts] == ["A", "B", "Q?"]
    with pytest.raises(pypcd.PCDError, match="no chat template"):
        lay(load(tiny("llama"), False), turn((Q, "Q")), chat=True)


def test_texts_of_messages_and_of_prompts() -> None:
    def texts(prompt: Prompt) -> list[str]:
        return ["".join(piece.text for piece in message) for _, message in prompt.turns]

    prompt = Prompt("T: ", ("a", "b"), "|", "? last", shots=(("one", " 1"), ("two", " 2")))
    assert texts(prompt) == ["one", " 1", "two", " 2", "T: a|b? last"]
    assert [role for role, _ in prompt.turns] == ["user", "assistant"] * 2 + ["user"]
    assert prompt.turns[-1][1] == (("T: ", N), ("a", S), ("|", N), ("b", S), ("? last", Q))
    assert prompt.whole == "one 1\n\ntwo 2\n\nT: a|b? last"
    first = prompt.replace(text_first=True)
    assert texts(first) == ["T: a|bone", " 1", "two", " 2", "? last"] and first.turns[-1][1] == (("? last", Q),)
    assert first.whole == "T: a|bone 1\n\ntwo 2\n\n? last"
    assert first.replace(shots=()).whole == prompt.replace(shots=()).whole == "T: a|b? last"


def test_passages_stand_between_the_text_and_the_question() -> None:
    between = "From the text above:\n\nx\n\ny\n\n"
    assert Prompt(segments=("a",), after="\n\nWho?").with_passages(["x", "y"]).text == f"a\n\n{between}Who?"
    conversation = Messages(
        (("user", (Piece("a", S), Piece("\n\nOne?", Q))), ("assistant", (Piece("1"),)), *turn((Q, "Two?")))
    )
    *before, (_, message) = conversation.with_passages(["x", "y"]).turns
    assert tuple(before) == conversation.turns[:-1] and message == (Piece(between), Piece("Two?", Q))


@pytest.fixture(scope="module")
def shared(tiny: Tiny) -> Any:
    with pypcd.Llama(tiny("llama"), n_ctx=256, n_threads=1, n_threads_batch=1) as llm:
        yield llm


@pytest.mark.parametrize("text", ["A<|you|>B", "<|you|><|me|>", "A<|you|", "<<|you|>", "A<|you|>\n<|me|>yes</s>"])
@pytest.mark.parametrize(
    ("before", "behind"), [("<|you|>", "|><|me|>"), ("{% if false %}<|me|>{% endif %}<|you|>", "")]
)
def test_no_message_has_a_mark_of_the_templates(text: str, before: str, behind: str, tiny: Tiny, load: Load) -> None:
    """That is no control token either, but read wherever its letters stand, across the message's end too; "<|no|>" is none of its."""
    made = ("<|you|>", "<|me|>", "<|no|>")
    llm = load(tiny("llama", chat_template=f"{before}{{{{ messages[0].content }}}}{behind}", defined=made), False)
    marks = {llm.tokenize(mark.encode(), add_bos=False)[-1]: mark for mark in made}
    laid = lay(llm, turn((S, text), (Q, "<|no|>Q?")), chat=True)
    assert [marks[token] for token in laid.tokens if token in marks] == [
        "<|you|>",
        "<|no|>",
        *["<|me|>"] * bool(behind),
    ]
    assert written(llm, laid.tokens).replace(" ", "") == f"<|you|>{text}<|no|>Q?{behind}"


def test_an_answer_is_begun_without_the_space_that_its_next_token_has(tiny: Tiny, load: Load) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>"
    llm = load(tiny("llama", chat_template=template), False)
    for chat, end in ((True, "<user>Q <answer>It is:"), (False, "Q It is: ")):
        tokens = lay(llm, turn((Q, "Q ")), chat=chat, answer_prefix="It is: ").tokens
        assert written(llm, tokens).endswith(end)
