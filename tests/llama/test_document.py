"""Documents: texts, a PDF written by hand, a DOCX, and files that are none."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from documents import pdf

import pypcd
from pypcd import errors
from pypcd.document import Document, read_document


@pytest.mark.parametrize(
    ("data", "segments"),
    [
        (b"One.\r\n\r\nTwo.\r\n", ("One.", "Two.")),
        ("\ufeff# Über\n\nText".encode(), ("# Über", "Text")),
        ("Größe\n\n✓".encode("utf-16"), ("Größe", "✓")),
        (b"PK\x03\x04 is how a zip begins", ("PK\x03\x04 is how a zip begins",)),
    ],
)
def test_texts(tmp_path: Path, data: bytes, segments: tuple[str, ...]) -> None:
    (tmp_path / "report.md").write_bytes(data)
    document = read_document(tmp_path / "report.md")
    assert document.name == "report.md" and document.segments == segments
    assert document.text == document.joiner.join(segments)
    assert document.prompt("Who?").text == f"{document.text}\n\nWho?"


def test_a_pdf(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "report.txt").write_bytes(
        pdf("The bridge was opened in 1931.", "Signed by Ruth Amsel.")
    )  # whatever its name
    document = read_document(tmp_path / "report.txt")
    assert [part.strip() for part in document.segments] == ["The bridge was opened in 1931.", "Signed by Ruth Amsel."]


def test_a_docx_in_its_order(tmp_path: Path) -> None:
    docx = pytest.importorskip("docx")
    made = docx.Document()
    made.add_heading("Report", 1)
    table = made.add_table(rows=3, cols=2)
    for row, texts in zip(table.rows, (("Bridges", "Bridges"), ("year", "bridges"), ("2", "2"))):
        for cell, text in zip(row.cells, texts):
            cell.text = text
    table.rows[0].cells[0].merge(table.rows[0].cells[1]).text = "Bridges"  # which stands once
    made.add_paragraph("Signed by Ruth Amsel.")
    made.save(tmp_path / "report.DOCX")
    (tmp_path / "report").write_bytes((tmp_path / "report.DOCX").read_bytes())  # as clients name it
    assert read_document(tmp_path / "report").text == read_document(tmp_path / "report.DOCX").text
    document = read_document(tmp_path / "report.DOCX")
    assert document.text == "Report\n\nBridges\nyear | bridges\n2 | 2\n\nSigned by Ruth Amsel."


@pytest.mark.parametrize(
    ("name", "data", "error", "said"),
    [
        ("a.txt", b" \n", ValueError, "a.txt has no text"),
        ("a.bin", b"\x7fELF\0\0", ValueError, "not a text file; allowed: texts in UTF-8, PDF, DOCX"),
        ("a.txt", b"caf\xe9", ValueError, "not in UTF-8: its byte 4 is e9; save it as UTF-8, such as with iconv"),
        ("a.pdf", b"%PDF-1.4 nonsense", ValueError, "cannot be read as a PDF"),
        ("a.pdf", pdf(""), ValueError, "has no text; pictures of pages"),
        ("a.docx", b"PK\x03\x04nonsense", ValueError, "cannot be read as a DOCX"),
        ("", None, OSError, "directory"),
        ("nowhere.txt", None, OSError, "No such file"),
        (None, None, ValueError, "name of the document's file is empty"),
    ],
)
def test_what_is_no_document(
    tmp_path: Path, name: str | None, data: bytes | None, error: type[Exception], said: str
) -> None:
    if name is None:
        with pytest.raises(error, match=said):
            read_document("")
        return
    if name.endswith((".pdf", ".docx")):
        pytest.importorskip("pypdf" if name.endswith("pdf") else "docx")
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=said):
        read_document(tmp_path / name)


def test_an_encrypted_pdf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter()
    writer.add_blank_page(200, 200)
    writer.encrypt("secret")
    writer.write(tmp_path / "a.pdf")
    with pytest.raises(ValueError, match="may be encrypted"):
        read_document(tmp_path / "a.pdf")

    def needs_more(*_: object) -> None:
        raise pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr(pypdf, "PdfReader", needs_more)
    with pytest.raises(ValueError, match=r"AES.*pip install cryptography"):
        read_document(tmp_path / "a.pdf")


def test_a_damaged_file_is_an_error_of_its_own_kind_whatever_its_reader_stumbles_over(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    docx = pytest.importorskip("docx")
    made = docx.Document()
    made.add_paragraph("Signed by Ruth Amsel.")
    made.save(tmp_path / "whole.docx")
    rng = random.Random(3)
    outcomes = set()
    for whole, name in ((pdf("One.", "Two.") * 2, "a.pdf"), ((tmp_path / "whole.docx").read_bytes(), "a.docx")):
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 4, 40))):
                data[rng.randrange(8, len(data))] = rng.randrange(256)
            (tmp_path / name).write_bytes(data)
            try:
                outcomes.add((name, bool(read_document(tmp_path / name).text)))
            except ValueError as error:
                assert isinstance(error, errors.InputError)
                outcomes.add((name, False))
    assert len(outcomes) == 4, "some of each are damaged, and some are read all the same"


@pytest.mark.parametrize(
    ("module", "package", "data"), [("pypdf", "pypdf", pdf("x")), ("docx", "python-docx", b"PK\x03\x04")]
)
def test_without_the_package_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str, data: bytes
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / f"a.{module}").write_bytes(data)
    with pytest.raises(pypcd.PCDError, match=f"pip install {package}$"):
        read_document(tmp_path / f"a.{module}")


def test_a_document_of_a_text() -> None:
    assert Document.of("notes", "a\n\nb").segments == ("a", "b")
    assert Document.of("notes", "a\0b").text == "ab", "characters that no text has are left out"
