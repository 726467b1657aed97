"""What is read of each format, in files that other programs wrote or that are written by hand, and what is refused."""

from __future__ import annotations

import datetime
import io
import itertools
import os
import struct
import subprocess
import sys
import time
import zipfile
from html import escape
from pathlib import Path
from typing import Any
from unittest import mock

import docx
import openpyxl
import pptx
import pytest
from documents import book, made_of, pdf, spreadsheet, word, zipped
from hypothesis import given, settings
from hypothesis import strategies as st
from lxml import etree
from PIL import Image
from pptx.util import Inches
from reportlab.lib.utils import ImageReader
from reportlab.pdfgen import canvas

from pypcd import document
from pypcd.document import Document, document_of, formats, read_document


def read(data: bytes, name: str = "a") -> Document:
    here = mock.patch.object(document, "converted_apart", lambda kind, data, _: formats.converted(kind, data))
    with here:  # in this process, which takes less time
        return document_of(name, data, name)


def saved(made: Any) -> bytes:
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


def picture() -> io.BytesIO:
    file = io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "png")
    return file


COMPATIBLE = "http://schemas.openxmlformats.org/markup-compatibility/2006"

# --- every word, in its order, with its place ---

# a word's letters; "0" is one that Excel would count with
WORDS = st.text(st.characters(categories=("L", "Nd", "Sm", "Po")), min_size=1, max_size=12).map(lambda word: f"x{word}")


@given(st.lists(st.lists(WORDS, min_size=1, max_size=9), min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_the_words_of_any_paragraphs_arrive_whatever_the_format(paragraphs: list[list[str]]) -> None:
    for kind, data in made_of([" ".join(words) for words in paragraphs]).items():
        document, titles = read(data), [[]] * len(paragraphs)
        if kind in ("XLSX", "ODS"):
            titles = [["Sheet" if kind == "XLSX" and i == 0 else str(i)] for i in range(len(paragraphs))]
        wanted = [word for title, words in zip(titles, paragraphs) for word in (*title, *words)]
        assert document.text.replace(" | ", " ").split() == wanted, kind
        unit = {"XLSX": "sheet", "ODS": "sheet", "PPTX": "slide", "EPUB": "chapter"}.get(kind)
        for number, begin in enumerate(document.pages, 1):
            assert document.place(begin, begin + 1) == f"{unit} {number}"
        assert len(document.pages) == (len(paragraphs) if unit else 0)


def run(text: str) -> str:
    return f'<w:r><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(*parts: str) -> str:
    return f"<w:p>{''.join(parts)}</w:p>"


def table(*rows: list[str]) -> str:
    cells = ["".join(f"<w:tc>{cell}</w:tc>" for cell in row) for row in rows]
    return f"<w:tbl>{''.join(f'<w:tr>{row}</w:tr>' for row in cells)}</w:tbl>"


BOX = f"<w:txbxContent>{paragraph(run('in a box'))}</w:txbxContent>"
DRAWN = f"<w:drawing><wps:wsp><wps:txbx>{BOX}</wps:txbx></wps:wsp></w:drawing>"
OLD = f"<w:pict>{BOX}</w:pict>"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (paragraph(run("paid in "), f"<w:smartTag><w:smartTag>{run('Harbour')}</w:smartTag>{run('town')}</w:smartTag>"), "paid in Harbourtown"),
        (
            paragraph(
                run("The toll is "),
                f"<w:ins>{run('seventeen')}</w:ins><w:del><w:r><w:delText>nine</w:delText></w:r></w:del>",
                f"<w:moveFrom>{run(' gone')}</w:moveFrom>{run(' crowns.')}",
            ),
            "The toll is seventeen crowns.",
        ),
        (f"<w:p><w:pPr><w:rPr><w:del/></w:rPr></w:pPr>{run('One ')}</w:p>{paragraph(run('sentence.'))}", "One sentence."),
        (
            table([paragraph(run("inner below")), table([paragraph(run("Amber costs 62 crowns"))]) + paragraph()]),
            "inner below | Amber costs 62 crowns",
        ),
        (table([paragraph(run("a")), paragraph(run("b"), "<w:r><w:br/></w:r>", run("c"))], [paragraph(), paragraph(run("d"))]), "a | b c\n| d"),
        (f"<w:sdt><w:sdtContent>{paragraph(run('a control'))}</w:sdtContent></w:sdt>", "a control"),
        (paragraph(run("signed "), f"<w:sdt><w:sdtContent>{run('by Amsel')}</w:sdtContent></w:sdt>"), "signed by Amsel"),
        (paragraph(f'<w:fldSimple w:instr="DATE">{run("1 May")}</w:fldSimple>', f"<w:bdo>{run(' and')}</w:bdo>", f"<w:dir>{run(' so')}</w:dir>"), "1 May and so"),
        (
            paragraph(
                '<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText>REF a</w:instrText></w:r>',
                f'<w:r><w:fldChar w:fldCharType="separate"/></w:r>{run("section 3")}<w:r><w:fldChar w:fldCharType="end"/></w:r>',
            ),
            "section 3",
        ),
        (paragraph(f"<w:r><w:ruby><w:rt>{run('kan')}</w:rt><w:rubyBase>{run('漢')}</w:rubyBase></w:ruby></w:r>"), "漢"),
        (paragraph(run("a"), "<w:r><w:cr/></w:r>", run("b"), "<w:r><w:softHyphen/><w:noBreakHyphen/></w:r>", run("c")), "a\nb\u2011c"),
        (paragraph(run("a"), f"<w:r><mc:AlternateContent><mc:Choice>{DRAWN}</mc:Choice><mc:Fallback>{OLD}</mc:Fallback></mc:AlternateContent></w:r>"), "a\n\nin a box"),
        (paragraph(run("a"), f"<w:r><mc:AlternateContent><mc:Choice>{DRAWN}</mc:Choice></mc:AlternateContent></w:r>"), "a\n\nin a box"),
        (paragraph(run("a"), f"<w:r>{DRAWN}</w:r>"), "a\n\nin a box"),
        (f'<w:p><w:pPr><w:framePr w:dropCap="drop"/></w:pPr>{run("D")}</w:p>{paragraph(run("rop cap"))}', "Drop cap"),
        (paragraph(run("a &lt; b &amp; c"), "<w:r><w:tab/></w:r>", run("d")), "a < b & c d"),
    ],
)  # fmt: skip
def test_text_of_a_docx_wherever_it_stands(body: str, text: str) -> None:
    document = read(word(body))
    assert (document.text, document.note) == (text, "")


def test_notes_of_a_docx_stand_at_its_end_and_what_is_left_out_is_said() -> None:
    body = paragraph(
        run("The ship sank."),
        '<w:r><w:footnoteReference w:id="2"/></w:r>',
        "<m:oMath><m:r><m:t>x</m:t></m:r></m:oMath>",
    )
    notes = f'<w:footnote w:id="2">{paragraph(run("Its name was Meridian."))}</w:footnote>'
    document = read(word(body, footnotes=notes, header1=paragraph(run("Confidential"))))
    assert document.text == "The ship sank.[1]\n\n[1] Its name was Meridian."
    assert document.note == "equations and headers are left out"
    number = f"<w:p><w:r><w:instrText>PAGE</w:instrText></w:r>{run('1')}</w:p>"
    assert read(word(body, footnotes=notes, header1=number)).note == "equations are left out"


def test_a_docx_of_word_processors(tmp_path: Path) -> None:
    made = docx.Document()
    made.add_heading("Report", 1)
    rows = made.add_table(rows=3, cols=2)
    for row, texts in zip(rows.rows, (("Bridges", "Bridges"), ("year", "bridges"), ("2", "2"))):
        for cell, text in zip(row.cells, texts):
            cell.text = text
    rows.rows[0].cells[0].merge(rows.rows[0].cells[1]).text = "Bridges"  # which stands once
    made.add_paragraph("Monday", style="List Number")
    made.add_paragraph("Sunday", style="List Bullet")
    made.add_comment(made.add_paragraph("Signed by Ruth Amsel.").runs, "Is it?")
    made.add_picture(picture())
    made.save(tmp_path / "report")  # as clients name it
    document = read_document(tmp_path / "report")
    assert document.text == "Report\n\nBridges\nyear | bridges\n2 | 2\n\n- Monday\n\n- Sunday\n\nSigned by Ruth Amsel."
    assert document.note == "comments and pictures are left out"


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<p>One<p>two <b>th</b>ree<br>four", "One\n\ntwo three\nfour"),
        ("<title>Cats</title><h1>All cats</h1>\n <div>sleep</div>", "Cats\n\nAll cats\n\nsleep"),
        ("<title>Cats</title><h1>Cats</h1>sleep", "Cats\n\nsleep"),
        ("<script>if (a<b) {}</script><style>p {}</style><template>x</template>a<!-- b -->c&eacute;&#233;&nbsp;d&shy;e", "acéé de"),
        ("<ul><li>a<li><p>b</p><ul><li>c</ul><li></ul>d", "- a\n- b\n  - c\n\nd"),
        ("<ol start=3><li>a</li><li value=7>b</li><li>c</li></ol>", "3. a\n7. b\n8. c"),
        ("<dl><dt>toll<dd>17 crowns<dt>fee<dd>none</dl>", "toll\n17 crowns\n\nfee\nnone"),
        ("<table><tr><th colspan=2>a<th>b<tr><td>c<td><td>d<tr><tr><td>e<td></table>f", "a | b\nc |  | d\ne\n\nf"),
        ("<table><tr><td><h1>a</h1><p>b</p></table>", "a\n\nb"),
        (f"<table><tr><td>menu<td><p>{'word ' * 300}</p><p>end</p></table>", f"menu\n\n{('word ' * 300).strip()}\n\nend"),
        ("<table><tr><td>a<table><tr><td>b<td>c</table><td>d</table>", "a b | c | d"),
        ("a<pre>\n  b\n    c</pre>d", "a\n\n\n  b\n    c\n\nd"),
        ("<ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "漢(kan)"),
        ("<ruby>漢<rp>(<rt>kan</rt><rp>)</ruby> and <rp>(</p> so on", "漢(kan) and\n\nso on"),
        ("<input type=checkbox checked>yes <input type=checkbox>no <input value='Varga'><input type=hidden value=x>", "[x] yes [ ] no Varga"),
        ("a<svg><title>no</title><svg/></svg>b<![CDATA[ <c>]]></p></td></li></table></ul>", "ab <c>"),
        ("\ud83d&#xd800;", "\ufffd"),
    ],
)  # fmt: skip
def test_html(html: str, text: str) -> None:
    data = f"<!doctype html>{html}".encode("utf-8", "ignore")
    assert read(data).text == text


TAGS = ["table", "tr", "td", "th", "ul", "ol", "li", "p", "pre", "h1", "div", "b", "dd", "rt"]


@given(st.lists(st.sampled_from([f"<{end}{tag}>" for tag in TAGS for end in ("", "/")] + ["<br>"]) | WORDS))
@settings(max_examples=200, deadline=None)
def test_no_word_of_html_is_lost_however_its_tags_are_mixed(parts: list[str]) -> None:
    html = "".join(part if part.startswith("<") else f" {escape(part)} " for part in parts)
    words = [word for word in formats.markup.of_html(html).body.split() if word.startswith("x")]
    assert words == [part for part in parts if part.startswith("x")]


def test_html_is_known_by_its_beginning_or_its_name_and_names_its_letters() -> None:
    assert read(b'<?xml version="1.0"?>\n<!-- a -->\n<html><p>a</html>').text == "a"
    assert read(b"<!-- a -->" * 40 + b"<html><p>a</html>").text == "a"
    assert read(b"<!-- a -->" * 40 + b"a").text.endswith("-->a"), "and not in exponential time"
    assert read(b"<p>a</p>", "a.HTM").text == "a"
    assert read(b"<p>a</p>", "a.md").text == "<p>a</p>"
    assert read("<html><meta charset='iso-8859-1'>é\u2019".encode("cp1252")).text == "é’", "as browsers take it"
    assert read("<html><meta charset=shift_jis>漢字".encode("shift_jis")).text == "漢字"
    for charset in ("utf-16", "UTF-16LE", "utf-32be", "u16"):
        assert read(f"<html><meta charset={charset}>é1".encode()).text == "é1", charset
    assert read("<html><meta charset=nonsense>é".encode()).text == "é"
    assert read("<html>é".encode("utf-16"), "a.html").text == "é"
    with pytest.raises(ValueError, match="a is not in UTF-8: its byte 7 is e9"):
        read(b"<html>\xe9")
    assert read(b"<html><img><math><mi>x</mi></math>a").note == "equations and pictures are left out"


def test_a_workbook() -> None:
    made = openpyxl.Workbook()
    sheet: Any = made.active
    sheet.title = "Prices"
    rows: dict[str, list[Any]] = {
        "item | price": ["item", "price", None],
        "amber | 62.5": ["amber", 62.5, None],
        "": [],
        "TRUE |  | 2024-05-01": [True, None, datetime.date(2024, 5, 1)],
        "0.3 | two lines": [0.1 + 0.2, "two\nlines"],
        "2024-01-02 03:04:00 | a | b": [datetime.datetime(2024, 1, 2, 3, 4), "a | b"],
    }
    for row in rows.values():
        sheet.append(row)
    hidden = made.create_sheet("Hidden")
    hidden.sheet_state = "hidden"
    hidden["C3"] = "secret"
    made.create_sheet("Empty")
    made.create_sheet("Last")
    document = read(saved(made))
    assert document.text == "\n\n".join(["Prices", "\n".join(filter(None, rows)), "Hidden", "secret", "Empty", "Last"])
    assert document.place(document.text.index("secret"), len(document.text)) == "sheets 2-4" and document.note == ""
    sheet["F1"] = "=1+1"
    assert read(saved(made)).note == "formulas that no program has computed are left out"
    with pytest.raises(ValueError, match="a has no text$"):
        read(spreadsheet(("Sheet1", [])))


def test_slides() -> None:
    made = pptx.Presentation()
    for number in (1, 2, 3):
        slide = made.slides.add_slide(made.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = f"Title {number}", f"first {number}\nsecond\vline"
    cells = slide.shapes.add_table(2, 2, 0, 0, Inches(3), Inches(1)).table
    for row, column in itertools.product(range(2), repeat=2):
        cells.cell(row, column).text = f"{row} {column}"
    slide.shapes.add_group_shape().shapes.add_textbox(0, 0, 9, 9).text_frame.text = "in a group"
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    made.slides._sldIdLst.insert(0, made.slides._sldIdLst[2])  # it is shown first
    slide.shapes.add_picture(picture(), 0, 0)
    document = read(saved(made))
    first = "Title 3\n\nfirst 3\nsecond\nline\n\n0 0 | 0 1\n1 0 | 1 1\n\nin a group\n\nNotes: Say it slowly."
    assert document.text == "\n\n".join([first, *(f"Title {i}\n\nfirst {i}\nsecond\nline" for i in (1, 2))])
    assert document.place(document.text.index("Say"), document.text.index("first 1")) == "slides 1-2"
    assert document.note == "pictures are left out"


@pytest.mark.parametrize(("choice", "fallback", "text"), [("new", "old", "new"), ("", "old", "old"), ("", "", "")])
def test_what_a_slide_says_in_two_ways_is_read_once(choice: str, fallback: str, text: str) -> None:
    made = pptx.Presentation()
    shapes = made.slides.add_slide(made.slide_layouts[5]).shapes
    shapes.title.text = "Title"
    ways = [shapes.add_textbox(0, 0, 9, 9) for _ in range(2)]
    for way, said in zip(ways, (choice, fallback)):
        way.text_frame.text = said
    both = etree.SubElement(shapes._spTree, f"{{{COMPATIBLE}}}AlternateContent")
    for way, name in zip(ways, ("Choice", "Fallback")):
        etree.SubElement(both, f"{{{COMPATIBLE}}}{name}").append(way._element)
    assert read(saved(made)).text == f"Title\n\n{text}".strip()


def test_a_book() -> None:
    document = read(book("<h1>One</h1><p>a &amp; b<img/></p>", "<p/>", "<h1>Two</h1><p>c</p>"))
    assert document.text == "One\n\na & b\n\nTwo\n\nc"
    assert document.place(document.text.index("Two"), len(document.text)) == "chapter 2"
    assert document.note == "pictures are left out"


def test_what_was_entered_in_a_pdf_is_read_on_its_page() -> None:
    file = io.BytesIO()
    made = canvas.Canvas(file)
    for page in (1, 2, 3):
        made.drawString(50, 700, f"Page {page}.")
        if page == 2:
            form = made.acroForm
            form.textfield(name="applicant", value="Leopold Varga", x=50, y=600)
            form.textfield(name="account", value="ZZ99 1234", tooltip="Account, with spaces", x=50, y=550)
            form.textfield(name="blank", value="", x=50, y=520)
            form.checkbox(name="resident", checked=True, x=50, y=500)
            form.choice(name="colour", options=["red", "blue"], value="blue", x=50, y=400)
            for size in "LM":
                form.radio(name="size", value=size, selected=size == "L", x=50, y=300)
            made.freeTextAnnotation("Typed on top", DA="/Helv 12 Tf", Rect=[50, 100, 200, 120])
        made.showPage()
    made.save()
    document = read(file.getvalue())
    fields = "applicant: Leopold Varga\nAccount, with spaces: ZZ99 1234\nresident: Yes\ncolour: blue\nsize: L"
    assert document.text == f"Page 1.\n\nPage 2.\n\n{fields}\nTyped on top\n\nPage 3."
    assert document.text[document.pages[1] : document.pages[2]].startswith("Page 2.") and len(document.pages) == 3


def pages(*drawn: str) -> bytes:
    """A PDF whose pages have text ("t"), a shape ("s"), a picture ("p") or nothing."""
    file = io.BytesIO()
    made = canvas.Canvas(file)
    shown = ImageReader(picture())
    draw: Any = {
        "t": (made.drawString, 50, 700, "Words."),
        "s": (made.rect, 9, 9, 99, 99),
        "p": (made.drawImage, shown, 9, 9),
    }
    for page in drawn:
        for what in page:
            call, *how = draw[what]
            call(*how)
        made.showPage()
    made.save()
    return file.getvalue()


def test_pages_of_a_pdf_without_a_text_layer_are_named() -> None:
    document = read(pages("t", "p", "t", "", "s"))
    assert document.note == "not read, since there is no text layer: page 2 and 5"
    assert document.place(document.text.rindex("Words"), len(document.text)) == "page 3"
    assert read(pages("p", "t")).note == "not read, since there is no text layer: page 1"
    assert read(pages("t", "tp")).note == "pictures are left out" and read(pages("t", "ts")).note == ""
    with pytest.raises(
        ValueError, match="a is a scan: none of its 2 pages has a text layer, .*; a program such as ocrmypdf"
    ):
        read(pages("p", "s"))


# --- what is refused ---


@pytest.mark.parametrize("name", ["~notes.txt", "./~notes.txt", "~nobody-of-this-name/notes.txt"])
def test_a_name_may_begin_with_a_tilde(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("~nobody-of-this-name").mkdir()
    Path(name).write_text("In box 0 lies the number 11.")
    assert read_document(name).text == "In box 0 lies the number 11."
    monkeypatch.setenv("HOME" if os.name != "nt" else "USERPROFILE", str(tmp_path))
    (tmp_path / "home.txt").write_text("of the user")
    assert read_document("~/home.txt").text == "of the user"


PART = word(paragraph(run("hello")))
TEXT = zipfile.ZipFile(io.BytesIO(PART)).read("word/document.xml").decode()


def with_document(xml: str, packing: int = zipfile.ZIP_DEFLATED) -> bytes:
    with zipfile.ZipFile(io.BytesIO(PART)) as file:
        return zipped({**{name: file.read(name) for name in file.namelist()}, "word/document.xml": xml}, packing)


def container(stream: str) -> bytes:
    return b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500) + stream.encode("utf-16-le") + bytes(64)


ENTITIES = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10 if i else "ha" * 10}">' for i in range(10))
OPEN = "application/vnd.oasis.opendocument"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (with_document(f"<!DOCTYPE a [{ENTITIES}]>{TEXT.replace('hello', '&e9;')}"), "declares a type of document in its XML"),
        (with_document(f'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/hostname">]>{TEXT.replace("hello", "&x;")}'), "declares a type of document"),
        (with_document(TEXT, zipfile.ZIP_LZMA), "has a part .* is packed in a way that no such file is"),
        (with_document(TEXT[:-9]), "cannot be read as a DOCX: .*may be encrypted or damaged"),
        (with_document(TEXT.replace("<w:p>", "<w:smartTag>" * 10**5 + "<w:p>").replace("</w:p>", "</w:p>" + "</w:smartTag>" * 10**5)), "cannot be read as a DOCX"),
        (PART[:400], "cannot be read as a ZIP: File is not a zip file"),
        (zipped({"a.txt": "text"}), "is a zip archive without a document; allowed: texts in UTF-8, HTML, PDF"),
        (zipped({"mimetype": f"{OPEN}.spreadsheet" + " " * 10**6}, zipfile.ZIP_BZIP2), "has a part mimetype that is packed in a way that no such file is"),
        (zipped({"mimetype": f"{OPEN}.text"}), "is in the format ODT, which is not read; save it as DOCX"),
        (zipped({"mimetype": f"{OPEN}.presentation"}), "is in the format ODP, which is not read; save it as PPTX"),
        (b"{\\rtf1 a}", "is in the format RTF, which is not read; save it as DOCX"),
        (container("WordDocument"), "is in the format DOC, which is not read; save it as DOCX"),
        (container("PowerPoint Document"), "is in the format PPT, which is not read; save it as PPTX"),
        (container("EncryptedPackage"), "is encrypted; save it without a password"),
        (container("Workbook"), "cannot be read as an XLS"),
        (container("a"), "is not a text file"),
        (book("<p>a</p>", encrypted="text/part 1.xhtml"), "is encrypted, as books"),
        (zipped({"META-INF/container.xml": "<container/>"}), "cannot be read as an EPUB"),
        (PART.replace(b"\x00\x00\x08\x00", b"\x01\x00\x08\x00"), "is encrypted; save it without a password"),
    ],
)  # fmt: skip
def test_what_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=f"^a file {said}"):
        read(data, "a file")


def bomb(n_bytes: int, n_said: int | None = None) -> bytes:
    """A DOCX of a few KB whose text has so many bytes; `n_said`: what its directory says of them."""
    data = with_document(" " * n_bytes + TEXT)
    size = len(TEXT) + n_bytes
    return data.replace(struct.pack("<I", size), struct.pack("<I", n_said if n_said is not None else size))


def refuses(data: bytes, said: str) -> None:
    """In a process of its own."""
    with pytest.raises(ValueError, match=f"^a {said}"):
        document_of("a", data, "a")


def test_what_a_file_unpacks_to_is_known_before_and_held_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYPCD_DOCUMENT_MIB", "3")
    assert len(bomb(4 << 20)) < 18000
    refuses(bomb(4 << 20), r"unpacks to 419\d+ bytes; at most 3145728 are read; PYPCD_DOCUMENT_MIB=5 allows them")
    monkeypatch.setenv("PYPCD_DOCUMENT_MIB", "5")
    assert document_of("a", bomb(4 << 20), "a").text == "hello"
    refuses(bomb(4 << 20, 1000), "cannot be read as a DOCX: Bad CRC-32")
    (tmp_path / "a.txt").write_bytes(b"a" * (6 << 20))
    with pytest.raises(
        ValueError, match="a.txt has more than 5242880 bytes; PYPCD_DOCUMENT_MIB=10 allows twice as many"
    ):
        read_document(tmp_path / "a.txt")


def test_no_archive_is_opened_in_this_process() -> None:
    files = made_of(["Signed by Ruth Amsel."])
    with mock.patch.object(zipfile, "ZipFile", side_effect=AssertionError):
        for kind, data in files.items():
            assert "Amsel" in document_of("a", data, "a").text, kind


@pytest.mark.skipif(sys.platform == "win32", reason="a process keeps its parent's number there")
def test_a_reader_ends_with_the_process_that_started_it() -> None:
    child = "from pypcd.document import apart; import time; apart.end_with_parent(); print('here', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]); sys.stdin.readline()"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as started:
        assert started.stdin and started.stdout and started.stdout.readline() == b"here\n"
        started.kill()
        started.wait()
        begun = time.monotonic()
        assert started.stdout.read() == b"" and time.monotonic() - begun < 30, "its end of the pipe is closed"


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_a_reader_that_ends_or_takes_too_long_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    made = openpyxl.Workbook()
    for place in ("A1", "XFD1048576"):  # what is between takes 400 GB
        made.active[place] = 1
    ended = r"cannot be read: its reader ended \(SIG\w+\); it is damaged, or takes more than 2048 MiB of memory"
    refuses(saved(made), ended)
    monkeypatch.setenv("PYPCD_DOCUMENT_SECONDS", "0.001")
    refuses(saved(made), "takes more than 0.001 seconds to read; PYPCD_DOCUMENT_SECONDS=0.002 allows them")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited on Linux")
def test_limits_keep_to_those_that_there_are() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (50, 50)); from pypcd.document.apart import limit; limit(1 << 30, 61);"
        "print(resource.getrlimit(resource.RLIMIT_CPU), 1 << 30 < resource.getrlimit(resource.RLIMIT_AS)[0] < 1 << 32)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(50, 50) True\n"


@pytest.mark.parametrize("name", ["a\0.pdf", "a" * 200_000, "\ud83d.pdf"])
def test_a_file_may_have_any_name(name: str) -> None:
    assert document_of(name, pdf("One."), name).text == "One."
    with pytest.raises(ValueError, match=f"^{name} cannot be read as a PDF"):
        document_of(name, b"%PDF-1.4 nonsense", name)


def test_whatever_python_finds_first_the_reader_is_this_pypcds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("html", "pypcd"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('another one')")
    monkeypatch.syspath_prepend(tmp_path)
    assert document_of("a", pdf("One."), "a").text == "One."


def test_memory_that_is_not_there_is_a_sentence() -> None:
    fails = {"PDF": mock.Mock(side_effect=MemoryError)}
    with (
        mock.patch.dict(formats.READERS, fails),
        pytest.raises(ValueError, match="^a takes more memory than there is to read it$"),
    ):
        read(pdf("One."))


@pytest.mark.parametrize(
    ("name", "value"), [("MIB", "0"), ("MIB", "x"), ("SECONDS", "0"), ("SECONDS", "inf"), ("SECONDS", "x")]
)
def test_wrong_limits_are_named(name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"PYPCD_DOCUMENT_{name}", value)
    (tmp_path / "a").write_bytes(pdf("One."))
    with pytest.raises(ValueError, match=f"^PYPCD_DOCUMENT_{name} is '{value}'; allowed: a number above 0, such as"):
        read_document(tmp_path / "a")
