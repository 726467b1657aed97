"""Documents: texts, PDFs, places, and files that are none."""

from __future__ import annotations

import os
import random
import textwrap
from pathlib import Path

import pytest
from documents import Placed, made_of, pdf

from pypcd import document, errors
from pypcd.document import Document, read_document
from pypcd.document.formats import converted, format_of


@pytest.mark.parametrize(
    ("data", "segments"),
    [
        (b"\n\nOne.\r\n\r\nTwo.\r\n", ("One.\n\n", "Two.")),
        ("\ufeff# Über\n\nText.".encode(), ("# Über\n\nText.",)),
        ("Größe.\n\n✓".encode("utf-16"), ("Größe.\n\n", "✓")),
        (b"PK\x03\x04 is how a zip begins", ("PK\x03\x04 is how a zip begins",)),
        (b"It begins with %PDF-1.4.", ("It begins with %PDF-1.4.",)),
        (pdf("The bridge was opened in 1931.", "Signed."), ("The bridge was opened in 1931.\n\n", "Signed.")),
        (b"HTTP/1.1 200 OK\xff\r\n\r\n" + pdf("Signed by Ruth Amsel."), ("Signed by Ruth Amsel.",)),
    ],
)
def test_texts_and_pdfs_whatever_their_names(tmp_path: Path, data: bytes, segments: tuple[str, ...]) -> None:
    (tmp_path / "report.md").write_bytes(data)
    document = read_document(tmp_path / "report.md")
    assert (document.name, document.segments, document.text) == ("report.md", segments, "".join(segments))
    assert len(document.pages) == (len(segments) if b"%%EOF" in data else 0) and document.note == ""


# paragraphs as they were written, of which a PDF has lines
WRITTEN = """\
The bridge of Harbourtown was opened in 1931, after nine years of work and two floods. Its nine arches are of granite from the quarry on Vell \
Island. A tenth one, which stood on the mud of the western bank, was taken down in 1954 because it had sunk by forty centimetres.

The toll is seventeen crowns. Whoever lives on the island pays nothing.

- Mondays, Tuesdays and Wednesdays: from seven in the morning to nine in the evening, with an hour at noon
- Sundays: closed

It was painted blue in 1988 and green in 2004, each time by volunteers of the rowing club and by their children, who got a lamp each."""


def test_a_pdfs_lines_are_joined_to_the_paragraphs_that_were_written(tmp_path: Path) -> None:
    lines = [part for line in WRITTEN.split("\n") for part in textwrap.wrap(line, 79, break_on_hyphens=False) or [""]]
    written = {text.replace("\n", " ") for text in WRITTEN.split("\n\n")}
    first_of_toll = next(i for i, line in enumerate(lines) if line.startswith("The toll"))
    for n_first in range(1, len(lines)):  # wherever a page ends
        pages = ["\n".join(lines[:n_first]).strip("\n"), "\n".join(lines[n_first:]).strip("\n")]
        (tmp_path / "a.pdf").write_bytes(pdf(*pages))
        document = read_document(tmp_path / "a.pdf")
        assert document.text.split() == WRITTEN.split()
        last, following = pages[0][-1], pages[1][0]
        if not (lines[n_first - 1] and lines[n_first] and (last in ".:" or not following.islower())):
            assert {text.replace("\n", " ") for text in document.text.split("\n\n")} == written, (
                "it goes on where a page ends only if no sentence does, and the next word is small"
            )
        assert [document.text[at:].startswith(page[:9]) for at, page in zip(document.pages, pages)] == [True, True]
        begin = document.text.index("The toll")
        assert document.place(begin, begin + 29) == f"page {1 if first_of_toll < n_first else 2}"
        assert document.place(0, len(document.text)) == "pages 1-2"


def placed(*columns: tuple[int, str], size: int = 10, y: int = 780) -> list[Placed]:
    return [(line, size, x, y - 12 * i) for x, text in columns for i, line in enumerate(text.split("\n"))]


FULL = "word " * 15 + "full"
HEBREW = {letter: f"{0x5D0 + i:04x}" for i, letter in enumerate("abcd")}


@pytest.mark.parametrize(
    ("pages", "letters", "text"),
    [
        (["x" * 74 + " har-\nbour"], {}, "x" * 74 + " harbour"),
        (["x" * 73 + " COVID-\n19 came"], {}, "x" * 73 + " COVID-19 came"),
        (["x" * 70 + " the end.\n\n\nNew one"], {}, "x" * 70 + " the end.\n\nNew one"),
        (["x" * 70 + " the end.\n   New one"], {}, "x" * 70 + " the end.\n\nNew one"),
        (["x" * 70 + " and it\n* goes on"], {}, "x" * 70 + " and it\n* goes on"),
        (["x" * 70 + " of two:\n1. goes on"], {}, "x" * 70 + " of two:\n1. goes on"),
        (["x" * 70 + " 12 and\n12. May"], {}, "x" * 70 + " 12 and 12. May"),
        (
            ["kind         2022       2023\nyachts      2,310      2,268\n" + "x" * 79],
            {},
            "kind  2022  2023\nyachts  2,310  2,268\n" + "x" * 79,
        ),
        (["a short line\nand another\nof a poem"], {}, "a short line\nand another\nof a poem"),
        # of two columns, the first goes on in the second
        (
            [placed((60, "one two three four five\nsix seven eight nine"), (330, "ten, and so on, to the end.\nDone"))],
            {},
            "one two three four five six seven eight nine ten, and so on, to the end. Done",
        ),
        ([placed((60, FULL), size=14) + placed((60, FULL), y=768)], {}, f"{FULL}\n\n{FULL}"),
        ([FULL, "goes on"], {}, f"{FULL} goes on"),
        ([f"{FULL}\nends", "goes on"], {}, f"{FULL} ends\n\ngoes on"),
        ([FULL, "Goes on"], {}, f"{FULL}\n\nGoes on"),
        (
            [f"{FULL}\na         1", "b         2\nc         3"],
            {},
            f"{FULL}\na         1\nb         2\nc         3".replace(" " * 9, "  "),
        ),
        # Hebrew begins at the right
        (
            [placed((60, "abcd " * 15 + "abcd"), (60 + 6 * 75, "\nabcd"), (60, "\n\n" + "abcd " * 15 + "abcd"))],
            HEBREW,
            "\u05d3\u05d2\u05d1\u05d0 " * 16
            + "\u05d3\u05d2\u05d1\u05d0\n"
            + ("\u05d3\u05d2\u05d1\u05d0 " * 16).strip(),
        ),
        (["ab" * 39 + "\nabc"], {"a": "4f60", "b": "597d", "c": "3002"}, "你好" * 40 + "。"),
        (["the oaice of"], {"a": "d83d"}, "the o\ufffdice of"),
        (["the oaice of"], {"a": "d83dde00"}, "the o\U0001f600ice of"),
    ],
)
def test_where_lines_of_a_pdf_are_borders(
    tmp_path: Path, pages: list[str | list[Placed]], letters: dict[str, str], text: str
) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf(*pages, letters=letters))
    assert read_document(tmp_path / "a.pdf").text == text


def test_places_are_lines_if_there_are_no_pages() -> None:
    document = Document.of("notes", "\nOne.\n\nTwo,\r\nthree.\n\nFour.\n")
    found, at = [], 0
    for piece in document.segments:
        found.append(document.place(at, at + len(piece)))
        at += len(piece)
    assert found == ["line 2", "lines 4-5", "line 7"]  # the file begins with an empty one
    for begin, end in ((0, 0), (-1, 2), (3, 100), (3, 2)):
        with pytest.raises(ValueError, match=f"{begin} to {end} is no part of a text of {at} characters"):
            document.place(begin, end)


def test_pages_are_counted_in_the_text_as_utf_8_can_hold_it_without_the_space_around_it() -> None:
    document = Document.of("a.pdf", "\r\n one\r\ntwo\0 \n", (0, 3, 8, 11))
    assert (document.text, document.pages) == ("one\ntwo", (0, 0, 4, 7))
    assert [document.place(*part) for part in ((0, 3), (4, 7), (3, 5))] == ["page 2", "page 3", "pages 2-3"]
    assert document == Document.of("a.pdf", document.text, document.pages)
    halves = Document.of("notes", "a\ud83d\ude00b\udc00c", (0, 4), "slide")
    assert (halves.text, halves.place(3, 5), halves.place(0, 4)) == ("a\U0001f600b\ufffdc", "slide 2", "slides 1-2")
    with pytest.raises(ValueError, match="unit of notes is 'verse'; allowed: page, slide, sheet, chapter"):
        Document.of("notes", "a", (0,), "verse")


@pytest.mark.parametrize(
    ("name", "data", "error", "said"),
    [
        ("a.txt", b" \n", ValueError, "a.txt has no text"),
        ("a.bin", b"\x7fELF\0\0", ValueError, "not a text file; allowed: texts in UTF-8, HTML, PDF, DOCX"),
        ("a.txt", b"caf\xe9", ValueError, "not in UTF-8: its byte 4 is e9; save it as UTF-8, such as with iconv"),
        ("a.pdf", b"%PDF-1.4 nonsense", ValueError, "cannot be read as a PDF"),
        ("a.pdf", pdf(""), ValueError, "a.pdf has no text$"),
        ("a.pdf", pdf("Signed by Ruth Amsel.", encrypt=True), ValueError, "password.*may be encrypted"),
        ("a.docx", b"PK\x03\x04nonsense", ValueError, "cannot be read as a DOCX"),
        (".", None, OSError, "directory"),
        ("nowhere.txt", None, OSError, "No such file"),
        ("", None, ValueError, "name of the document's file is empty"),
    ],
)
def test_what_is_no_document(
    name: str, data: bytes | None, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if data is not None:
        Path(name).write_bytes(data)
    with pytest.raises(error, match=said):
        read_document(name)


def test_a_damaged_file_is_an_error_of_its_own_kind_whatever_its_reader_stumbles_over() -> None:
    outcomes = set()
    wholes = {"PDF": pdf("One.", "Two.") * 2, **made_of(["Signed by Ruth Amsel."])}
    for kind, whole in wholes.items():
        rng = random.Random(kind)
        for n_changed in (1, 4, 40) * 20:
            data = bytearray(whole)
            for _ in range(n_changed):
                data[rng.randrange(8, len(data))] = rng.randrange(256)
            try:
                found = format_of(f"a.{kind}", bytes(data))
                outcomes.add((kind, bool(found and converted(found, bytes(data)).text)))
            except ValueError as error:
                assert isinstance(error, errors.InputError)
                outcomes.add((kind, False))
    both = {(kind, whole) for kind in wholes for whole in (True, False)}
    assert outcomes == both, "some of each are damaged, and some are read all the same"


def test_a_file_that_is_as_it_was_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(pdf("One."))
    assert read_document(path).text == "One."
    with monkeypatch.context() as without:
        without.setattr(document, "document_of", None)
        assert read_document(path).text == read_document(str(path)).text == "One."
    path.write_bytes(pdf("Two."))
    os.utime(path, (1, 1))
    assert read_document(path).text == "Two."
    for text in (b"one", b"two"):
        read, write = os.pipe()
        os.write(write, text)
        os.close(write)
        assert read_document(f"/dev/fd/{read}").text == text.decode()
        os.close(read)
