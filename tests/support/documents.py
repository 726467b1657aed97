"""Files that the tests of documents read."""

from __future__ import annotations

import html
import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from reportlab.pdfbase.pdfdoc import PDFStream
from reportlab.pdfgen import canvas

# a line of text, its size, and where it begins, in points from the left and from below
Placed = tuple[str, int, int, int]


def pdf(*pages: str | Sequence[Placed], letters: Mapping[str, str] | None = None, encrypt: bool = False) -> bytes:
    """A PDF with these pages of lines, in a font whose letters are .6 of its size wide. A page of a text has room for 79 of them between even
    margins, in lines that are 12 points apart.

    Args:
        letters: what some letters stand for, in UTF-16 as hexadecimal digits.
        encrypt: with a password.
    """
    file = io.BytesIO()
    made = canvas.Canvas(file, (594, 842), encrypt="swordfish" if encrypt else None)
    for page in pages:
        lines = [(t, 10, 60, 780 - 12 * k) for k, t in enumerate(page.split("\n"))] if isinstance(page, str) else page
        for text, size, x, y in lines:
            made.setFont("Courier", size)
            made.drawString(x, y, text)
        made.showPage()
    if letters:
        codes = {chr(code): f"{code:04x}" for code in range(32, 127)} | dict(letters)
        rows = "\n".join(f"<{ord(letter):02x}> <{code}>" for letter, code in codes.items())
        space = "begincmap\n1 begincodespacerange <00> <ff> endcodespacerange\n"
        table = PDFStream(content=f"{space}{len(codes)} beginbfchar\n{rows}\nendbfchar\nendcmap")
        for font in made._doc.idToObject["BasicFonts"].dict.values():
            font.ToUnicode = made._doc.Reference(table)
    made.save()
    return file.getvalue()


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def zipped(parts: Mapping[str, str | bytes], packing: int = zipfile.ZIP_DEFLATED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", packing) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return made.getvalue()


def word(body: str, **parts: str) -> bytes:
    """A DOCX of WordprocessingML; `parts`: others, such as footnotes."""
    spaces = {
        "w": WORD,
        "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
        "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
        "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
    }
    names = " ".join(f'xmlns:{short}="{long}"' for short, long in spaces.items())
    kinds = {"document": "document", "footnotes": "footnotes", "header1": "hdr"}
    made = {
        name: f"<w:{kinds[name]} {names}>{text}</w:{kinds[name]}>" for name, text in {"document": body, **parts}.items()
    }
    made["document"] = made["document"].replace(body, f"<w:body>{body}</w:body>")
    target = f'<Relationship Id="r1" Type="{OFFICE}/officeDocument" Target="word/document.xml"/>'
    return zipped(
        {
            "[Content_Types].xml": '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"/>',
            "_rels/.rels": f'<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">{target}</Relationships>',
            **{f"word/{name}.xml": text for name, text in made.items()},
        }
    )


def book(*chapters: str, encrypted: str = "") -> bytes:
    """An EPUB of XHTML bodies. Its files' names are in another order than its chapters.

    Args:
        encrypted: the name of a part.
    """
    names = [f"part {len(chapters) - i}.xhtml" for i in range(len(chapters))]
    items = "".join(
        f'<item id="c{i}" href="{n.replace(" ", "%20")}" media-type="application/xhtml+xml"/>'
        for i, n in enumerate(names)
    )
    order = "".join(f'<itemref idref="c{i}"/>' for i in range(len(names)))
    lock = f'<encryption><CipherData><CipherReference URI="{encrypted}"/></CipherData></encryption>'
    return zipped(
        {
            "mimetype": "application/epub+zip",
            "META-INF/container.xml": '<container><rootfiles><rootfile full-path="text/book.opf"/></rootfiles></container>',
            "text/book.opf": f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{order}</spine></package>',
            **{
                f"text/{name}": f'<?xml version="1.0"?><html xmlns="http://www.w3.org/1999/xhtml"><head><title>A book</title></head><body>{body}</body></html>'
                for name, body in zip(names, chapters)
            },
            **({"META-INF/encryption.xml": lock} if encrypted else {}),
        }
    )


def spreadsheet(*tables: tuple[str, Sequence[Sequence[str]]]) -> bytes:
    """An ODS of sheets with a name and rows of texts."""
    rows = {
        name: "".join(
            "<table:table-row>"
            + "".join(
                f'<table:table-cell office:value-type="string"><text:p>{html.escape(cell)}</text:p></table:table-cell>'
                for cell in row
            )
            + "</table:table-row>"
            for row in table
        )
        for name, table in tables
    }
    space = "urn:oasis:names:tc:opendocument:xmlns"
    sheets = "".join(f'<table:table table:name="{name}">{text}</table:table>' for name, text in rows.items())
    kind = "application/vnd.oasis.opendocument.spreadsheet"
    content = (
        f'<office:document-content xmlns:office="{space}:office:1.0" xmlns:table="{space}:table:1.0" xmlns:text="{space}:text:1.0">'
        f"<office:body><office:spreadsheet>{sheets}</office:spreadsheet></office:body></office:document-content>"
    )
    listed = f'<manifest:manifest xmlns:manifest="{space}:manifest:1.0"><manifest:file-entry manifest:full-path="/" manifest:media-type="{kind}"/></manifest:manifest>'
    return zipped({"mimetype": kind, "META-INF/manifest.xml": listed, "content.xml": content})


def made_of(paragraphs: Sequence[str]) -> dict[str, bytes]:
    """The same paragraphs in each format, by programs that have nothing to do with those that read them."""
    import docx
    import openpyxl
    import pptx

    text, workbook, deck = docx.Document(), openpyxl.Workbook(), pptx.Presentation()
    for i, paragraph in enumerate(paragraphs):
        text.add_paragraph(paragraph)
        sheet: Any = workbook.create_sheet(str(i)) if i else workbook.active
        sheet.append(paragraph.split(" "))
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.placeholders[1].text = paragraph
    files = {}
    for kind, made in (("DOCX", text), ("XLSX", workbook), ("PPTX", deck)):
        file = io.BytesIO()
        made.save(file)
        files[kind] = file.getvalue()
    bodies = [f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs]
    return {
        **files,
        "EPUB": book(*bodies),
        "HTML": f"<!DOCTYPE html>{''.join(bodies)}".encode(),
        "ODS": spreadsheet(*((str(i), [paragraph.split(" ")]) for i, paragraph in enumerate(paragraphs))),
    }
