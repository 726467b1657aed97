"""What is read of documents, if not all of them: by hand, and held against the same parts handed over as a text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Load, Tiny
from documents import pdf
from hypothesis import assume, given
from hypothesis import strategies as st

import pypcd
from pypcd.ask import chosen, documents_in, prompt_of, read_of, size
from pypcd.cli import main
from pypcd.document import Document
from pypcd.document.folder import read_files

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}<s>assistant\n"
FACTS = ("The amber lamp burns oil.", "The bronze bell is cracked.", "The copper gate stays shut.", "The drum is new.")
KEEPERS = [f"The keeper of lamp {i} is number {1000 + i}, and nobody else." for i in range(60)]
WORDS = ["amber", "bronze", "copper", "drum", "lamp", "bell", "gate", "and", "or", "zinc"]


class Words:
    """In the place of a model: a token is a word."""

    def __init__(self) -> None:
        self.n = 0  # of the words that were counted

    def n_ctx(self) -> int:
        return 4096

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        self.n += len(text.split())
        return [0] * len(text.split())


def asked(documents: Sequence[Document], *questions: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for i, question in enumerate(questions):
        turns += [{"role": "assistant", "content": "so"}] * bool(i)
        turns.append({"role": "user", "content": question, **({} if i else {"documents": list(documents)})})
    return turns


def read(turns: Sequence[Any]) -> list[list[str]]:
    """The parts in each of the user's messages."""
    return [
        [document.text[b:e].strip() for document in documents_in([turn]) for b, e in document.read]
        for turn in turns
        if turn["role"] == "user"
    ]


# -- which parts -------------------------------------------------------------------------------------------------------


def house(*paragraphs: str) -> Document:
    return Document.of("house", "\n\n".join(paragraphs))


HOUSE = house(*FACTS)  # of 5, 5, 5 and 4 words


def test_the_best_parts_are_read_in_their_order_and_a_later_questions_stand_behind_them() -> None:
    turns, said = chosen(Words(), asked([HOUSE], "Which gate, which bell?", "And the lamp, the gate?"), 10, 4096)
    assert read(turns) == [[FACTS[1], FACTS[2]], [FACTS[0]]] and said == "3 of 4 parts"
    assert prompt_of(turns[:1]).whole == f"{FACTS[1]}\n\n{FACTS[2]}\n\nWhich gate, which bell?"
    turns, said = chosen(Words(), asked([HOUSE], "zinc?"), 10, 4096)
    assert read(turns) == [[FACTS[0], FACTS[1]]] and said == "2 of 4 parts", "the beginning, if no word is there"
    assert read(chosen(Words(), asked([HOUSE], "Which gate?"), 1, 4096)[0]) == [[FACTS[2]]], "one at least"


@pytest.mark.parametrize(("most", "all_of_it"), [(None, True), ("all", True), (19, True), (18, False)])
def test_what_fits_is_read_whole(most: Any, all_of_it: bool) -> None:
    messages = asked([HOUSE], "Which gate?")
    turns, said = chosen(Words(), messages, most, 4096)
    assert (turns == messages, said == "") == (all_of_it, all_of_it)


def test_what_does_not_fit_in_the_context_is_read_in_parts_unless_all_is_asked_for() -> None:
    documents = [Document.of(str(i), "\n\n".join(f"{fact} {i}" for fact in FACTS)) for i in range(40)]
    messages = asked(documents, "Which bell has 7?")
    turns, said = chosen(Words(), messages, None, 200)
    (parts,) = read(turns)
    assert said == f"{len(parts)} of 160 parts, of {len(turns[0]['documents'])} of 40 documents"
    assert "The bronze bell is cracked. 7" in parts
    assert 60 < sum(len(part.split()) for part in parts) <= 75, "half of the room"
    assert chosen(Words(), messages, "all", 200) == (messages, "")


@pytest.mark.parametrize("n_ctx", [256, 1024, 4096])
def test_a_later_question_finds_room_for_its_parts_and_a_new_document_is_begun(n_ctx: int) -> None:
    rooms = [f"Room {i} is as large as the others, and nobody lives there now." for i in range(2000)]
    zinc, note = "The zinc is in the cellar.", Document.of("note", "Buy oil.\n\nPaint.")
    messages = asked([house(*rooms, zinc)], "What is there?", "Where is the zinc?", "What about this one?")
    messages[-1]["documents"] = [note]
    turns, said = chosen(Words(), messages, None, n_ctx)
    first, second, third = read(turns)
    assert first[0].startswith("Room 0") and second == [zinc] and third == ["Buy oil.", "Paint."]
    assert said.endswith("of 2003 parts, of 2 of 2 documents")


def test_a_part_that_is_larger_than_the_context_is_passed_over() -> None:
    document = house("drum " + "zz " * 288 + ".", "The drum is new.", "No bell rings.")
    turns, said = chosen(Words(), asked([document], "Which drum?"), None, 256)
    assert read(turns) == [["The drum is new.", "No bell rings."]] and said == "2 of 3 parts"
    with pytest.raises(ValueError, match="no part of the documents fits in a context of 256 tokens"):
        chosen(Words(), asked([house("drum " + "zz " * 288)], "Which drum?"), None, 256)


def test_what_was_read_takes_no_room_anew() -> None:
    big, middle, small = "copper" + " zz" * 288, "yy " * 19 + "yy.", "drum bell gate."
    document = house(big, middle, small, "xx " * 400)
    turns, _ = chosen(Words(), asked([document], "copper?", "copper copper drum?"), 300, 420)
    assert read(turns) == [[big], [small]]


def test_a_text_that_cannot_fit_is_not_counted() -> None:
    words, huge = Words(), Document.of("huge", "word " * 2_000_000)
    messages = asked([huge], "Which word?")
    with pytest.raises(
        ValueError, match='read is "all", but the documents have more than 156249 tokens, and the context 4096'
    ):
        chosen(words, messages, "all", 4096)
    assert words.n == 0
    chosen(words, messages, None, 4096)
    assert (size(words, huge), size(words, HOUSE)) == ("more than 4096 tokens", "19 tokens")
    assert words.n < 100_000


@pytest.mark.parametrize(
    ("unit", "others", "wanted"),
    [
        ("page", [], "2 of 4 pages"),
        ("slide", [], "2 of 4 slides"),
        ("sheet", [], "1 of 1 sheets, in part"),
        ("page", [Document.of("notes", "Nothing.\n\nAt all.")], "2 of 6 parts, of 1 of 2 documents"),
    ],
)
def test_pages_are_counted_if_there_are_any(unit: str, others: list[Document], wanted: str) -> None:
    begins = [0] if unit == "sheet" else [HOUSE.text.index(fact) for fact in FACTS]
    paged = Document.of("book", HOUSE.text, begins, unit)
    assert chosen(Words(), asked([paged, *others], "Which gate, which bell?"), 10, 4096)[1] == wanted


TEXTS = st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=6).map(" ".join), min_size=1, max_size=12)


@given(
    st.lists(TEXTS, min_size=1, max_size=3),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_earlier_questions_stay_as_they_were(texts: list[list[str]], questions: list[str], most: int) -> None:
    documents = [Document.of(str(i), ". \n\n".join(text) + ".") for i, text in enumerate(texts)]
    messages = asked(documents, *questions)
    turns, said = chosen(Words(), messages, most, 4096)
    assume(said)
    parts = [(document.name, span) for turn in turns for document in documents_in([turn]) for span in document.read]
    assert len(set(parts)) == len(parts), "each part once"
    for turn in turns:
        own = [(document.name, span) for document in documents_in([turn]) for span in document.read]
        assert own == sorted(own)
        longest = max(len(part.split()) for text in texts for part in text)
        assert sum(len(part.split()) for one in read([turn]) for part in one) <= max(most, longest)
    for n in range(1, len(messages), 2):
        before, said = chosen(Words(), messages[:n], most, 4096)
        assert not said or before == turns[:n]


def test_how_much_is_a_number_or_all() -> None:
    assert [read_of(given) for given in (None, "all", 512, "512")] == [None, "all", 512, 512]
    for wrong in (0, -1, True, 1.5, "some", "", "0", []):
        with pytest.raises(
            ValueError, match='allowed: "all", or the most tokens to read of the documents, such as 4096'
        ):
            read_of(wrong)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def llm(tiny: Tiny, load: Load) -> pypcd.Llama:
    path = tiny(seed=3, n_layer=2, n_ctx_train=4096, chat_template=TEMPLATE)
    return load(path, None, n_ctx=1024, flash_attn=True, f16=True)


def test_an_answer_is_that_to_the_parts_alone_with_places_in_the_whole(llm: pypcd.Llama) -> None:
    pages = [f"Page {i} tells of lamp {i}.\n\nThe keeper of lamp {i} is number {i * 7}." for i in range(30)]
    text = "\n\n".join(pages)
    book = Document.of("book.pdf", text, [text.index(page) for page in pages])
    answer = llm.ask(book, "Who is the keeper of lamp 17?", read=200, max_tokens=8, cache=False)
    (turn,) = chosen(llm, asked([book], "Who is the keeper of lamp 17?"), 200, llm.n_ctx())[0]
    parts = Document.of("parts", "\n\n".join(read([turn])[0]))
    alone = llm.ask(parts, "Who is the keeper of lamp 17?", max_tokens=8, cache=False)
    assert (answer.text, answer.written.n_prompt) == (alone.text, alone.written.n_prompt)
    assert "keeper of lamp 17" in answer.passages[-1].text or "keeper of lamp 17" in answer.passages[0].text
    for source in answer.passages:
        assert book.text[source.begin : source.end] == source.text
        assert source.place == f"page {next(i for i, page in enumerate(pages, 1) if source.text in page)}"
    read_pages = [page for page in pages if any(part in page for part in read([turn])[0])]
    whole = all(part in read([turn])[0] for page in read_pages for part in page.split("\n\n"))
    assert answer.read == f"{len(read_pages)} of 30 pages{'' if whole else ', in part'}" and documents_in(
        answer.messages
    ) == [book]


def test_parts_that_would_all_be_repeated_are_named_and_not_repeated(llm: pypcd.Llama) -> None:
    text = "\n\n".join(KEEPERS)
    for most in (1, 100):
        how: Any = {"text": text, "read": most, "max_tokens": 4, "cache": False}
        answer = llm.ask(question="Who keeps lamp 17, and lamp 42?", **how)
        assert 0 < len(answer.passages) == int(answer.read.split()[0]) <= 2 and answer.note == ""
        for source in answer.passages:
            line = KEEPERS.index(source.text)
            assert (source.place, source.finder) == (f"line {2 * line + 1}", "bm25") and source.score > 0
            assert text[source.begin : source.end] == source.text and line in (17, 42)
        plain = llm.ask(question="Who keeps lamp 17, and lamp 42?", method="plain", **how)
        assert (plain.text, plain.written.n_prompt) == (answer.text, answer.written.n_prompt) and not plain.passages
    none = llm.ask(question="Zebra?", text=text, read=1, max_tokens=4, cache=False)
    assert none.passages == () and none.note == "the text is too short to have passages" and none.read
    short = llm.ask(question="Who keeps lamp 17?", text=KEEPERS[17], max_tokens=4, cache=False)
    assert short.passages == () and short.note == "the text is too short to have passages"


def test_a_follow_up_reads_further_parts_behind_those_that_are_there(llm: pypcd.Llama) -> None:
    text = "\n\n".join(KEEPERS)
    first = llm.ask(question="Who keeps lamp 17?", text=text, read=150, method="plain", max_tokens=4)
    on = llm.ask(question="And lamp 42?", after=first, read=150, method="plain", max_tokens=4)
    assert first.read != on.read != ""
    assert on.written.n_prompt > first.written.n_prompt
    assert on.written.n_evaluated < on.written.n_prompt - 100, "the first parts are not read again"


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    root = tmp_path / "my papers"
    for name, data in (
        ("b.txt", b"Of b."),
        ("a/c.pdf", pdf("Of c.", "Of d.")),
        ("a/.hidden", b"No."),
        (".git/x", b"No."),
        ("e.bin", b"\0" * 99),
        ("empty", b""),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (tmp_path / "secret").write_text("Of nobody.")
    (root / "out").symlink_to(tmp_path / "secret")
    os.mkfifo(root / "pipe")
    documents, left_out = read_files([root, Document.of("mine", "Of me.")])
    assert [(document.name, document.text) for document in documents] == [
        ("my papers/b.txt", "Of b."),
        ("my papers/a/c.pdf", "Of c.\n\nOf d."),
        ("mine", "Of me."),
    ]
    assert left_out == "not read: my papers/e.bin, my papers/empty, my papers/out and 1 more"
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none has no file that can be read"):
        read_files([tmp_path / "none"])
    with pytest.raises(FileNotFoundError):
        read_files([root / "nowhere"])


def test_files_of_one_name_are_called_as_they_were_typed(tmp_path: Path) -> None:
    paths = [tmp_path / folder / name for folder in "ab" for name in ("report.txt", f"{folder}.txt")]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"This is {path.parent.name}.")
    documents, _ = read_files([*paths, paths[0]])
    reports = [str(paths[0]), "a.txt", str(paths[2]), "b.txt", str(paths[0])]
    assert [document.name for document in documents] == reports
    assert [document.name for document in read_files(paths[:2] * 2)[0]] == ["report.txt", "a.txt"] * 2


def test_a_folder_is_read_until_it_is_stopped(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)
    asked = iter([False, False, True])
    with pytest.raises(pypcd.PCDError, match="was not read to its end"):
        read_files([tmp_path], lambda: next(asked))
    assert next(asked, None) is None


def test_folders_that_are_not_read_are_named_and_why_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterdir = Path.iterdir

    def opened(path: Path) -> Iterator[Path]:
        if path.name == "shut":
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", opened)  # for the superuser no folder is shut
    for name in ("papers/shut", "papers/a", "other", "shut"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "papers" / "a" / "b.txt").write_text("Of b.")
    (tmp_path / "papers" / "link").symlink_to(tmp_path / "other")
    (document,), left_out = read_files([tmp_path / "papers"])
    assert (document.name, left_out) == ("papers/a/b.txt", "not read: papers/link, papers/shut")
    with pytest.raises(PermissionError):
        read_files([tmp_path / "shut"])
    (tmp_path / "other" / "c").write_bytes(b"")
    with pytest.raises(ValueError, match="^c has no text"):
        read_files([tmp_path / "other"])
    monkeypatch.setenv("PYPCD_DOCUMENT_MIB", "abc")
    with pytest.raises(ValueError, match="^PYPCD_DOCUMENT_MIB is 'abc'; allowed: a number above 0"):
        read_files([tmp_path / "papers"])


def test_commands_say_what_was_read(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny(seed=3, n_layer=2, n_ctx_train=4096, chat_template=TEMPLATE)
    for i in range(3):
        text = "\n\n".join(f"The keeper of lamp {i}{j} is number {j * 7}." for j in range(20))
        (tmp_path / f"{i}.txt").write_text(text)
    how = ["--context", str(tmp_path), "--read", "160", "--method", "replay", "--max-tokens", "2"]
    assert main(["answer", str(model), "-p", "Who keeps lamp 17?", *how]) == 0
    assert re.search(r"read \d of 60 parts, of \d of 3 documents; --read all reads all", capsys.readouterr().err)
    assert main(["answer", str(model), "-p", "Who keeps lamp 17?", *how, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert re.fullmatch(r"\d of 60 parts, of \d of 3 documents", told["read"])
    assert "The keeper of lamp 17 is number 49." in [passage["text"] for passage in told["passages"]]
