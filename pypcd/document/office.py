"""The text of office files and e-books."""

from __future__ import annotations

import io
import itertools
import posixpath
import re
import urllib.parse
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Callable, Iterator

from pypcd.document import markup
from pypcd.document.parts import Archive, Converted, has, left_out, local, named, row
from pypcd.errors import InputError

__all__ = ["docx", "epub", "pptx", "sheets"]

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
WRAPPERS = {"bdo", "dir", "fldSimple", "ruby", "rubyBase"}  # around a DOCX's text, and unknown to mammoth
BACK = re.compile(r' ?<a href="#(?:foot|end)note-ref-[^"]*">↑</a>')  # from a note to its place in the text
NOTE = re.compile(r'<li id="(?:foot|end)note-[^"]*">(?:<p>)?')
# what is left out, by its elements, and by the names of a workbook's parts
LEFT_OUT = {
    "altChunk": "embedded documents",
    "chart": "charts",
    "commentReference": "comments",
    "imagedata": "pictures",
    "oMath": "equations",
    "pic": "pictures",
    "relIds": "diagrams",
}
PARTS = {
    "Object ": "charts",
    "Pictures/": "pictures",
    "xl/charts/": "charts",
    "xl/comments": "comments",
    "xl/media/": "pictures",
    "xl/threadedComments/": "comments",
}
NOT_COMPUTED = re.compile(rb"</(?:\w+:)?f>\s*(?:<(\w+:)?v\s*/>|<(\w+:)?v>\s*</(\w+:)?v>)?\s*</(\w+:)?c>")
NO_TEXT = {"sldImg", "sldNum"}  # of a slide: its picture and its number


def docx(data: bytes) -> Converted:
    """Tracked changes are as if they were accepted. Foot- and endnotes stand at the end."""
    import mammoth  # type: ignore[import-untyped]

    archive, kinds = Archive(data), set[str]()

    def mended(name: str) -> bytes | None:
        if not name.endswith((".xml", ".rels")) or name.startswith("customXml/"):
            return None
        root = archive.xml(name)
        kinds.update(_mend(root))
        margin = re.fullmatch(r"word/(header|footer)\d*\.xml", name)
        if margin and any(map(str.isalpha, "".join(element.text or "" for element in named(root, "t")))):
            kinds.add(f"{margin[1]}s")  # not for a page's number alone
        return ET.tostring(root)

    html: str = mammoth.convert_to_html(
        _copy(archive, mended), include_embedded_style_map=False, convert_image=lambda image: []
    ).value
    numbers = itertools.count(1)
    html = NOTE.sub(lambda _: f"<p>[{next(numbers)}] ", BACK.sub("", html))
    html = html.replace("<ol>", "<ul>")  # which numbers its items have is not known
    return Converted(markup.of_html(html).body, note=left_out(kinds))


def _mend(root: ET.Element) -> set[str]:
    """Put text where mammoth finds it. Returns what is left out."""
    for element in list(root.iter()):
        name = local(element)
        if name == "AlternateContent" and len(element):
            element.tag = WORD + "smartTag"  # of which mammoth reads what is in it
            element[:] = max(list(element), key=lambda one: (has(one, "txbxContent"), local(one) == "Fallback"))[:]
        elif name in WRAPPERS:
            element.tag = WORD + "smartTag"
        elif element.tag == WORD + "cr":
            element.tag = WORD + "br"
        elif name == "framePr" and WORD + "dropCap" in element.attrib:
            # as of a paragraph whose end was deleted: a large letter goes before the next one's first word
            element.tag = WORD + "rPr"
            ET.SubElement(element, WORD + "del")
        elif name == "drawing" and has(element, "txbxContent"):
            element.tag = WORD + "pict"
            element[:] = list(named(element, "txbxContent"))
    return {LEFT_OUT[local(element)] for element in named(root, *LEFT_OUT)}


def _copy(archive: Archive, part: Callable[[str], bytes | None]) -> io.BytesIO:
    """An archive for those who would unpack without a limit.

    Args:
        part: its content by its name; None: it is not needed.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name in dict.fromkeys(archive.names):
            if (content := part(name)) is not None:
                file.writestr(name, content)
    made.seek(0)
    return made


def sheets(data: bytes) -> Converted:
    """A line for each row, as the workbook was last computed; hidden sheets too."""
    import python_calamine

    kinds, file = set[str](), io.BytesIO(data)
    if data.startswith(b"PK"):
        archive = Archive(data)
        kinds = {kind for begin, kind in PARTS.items() if archive.has(begin)}

        def part(name: str) -> bytes | None:
            content = None if name.startswith(("xl/media/", "Pictures/")) else archive.read(name)
            if name.startswith("xl/worksheets/") and content and NOT_COMPUTED.search(content):
                kinds.add("formulas that no program has computed")
            return content

        file = _copy(archive, part)
    book = python_calamine.CalamineWorkbook.from_filelike(file)
    tables = dict[str, list[str]]()
    for sheet in book.sheets_metadata:
        is_chart = sheet.typ == python_calamine.SheetTypeEnum.ChartSheet
        kinds |= {"charts"} if is_chart else set()
        lines = [] if is_chart else book.get_sheet_by_name(sheet.name).to_python()
        tables[sheet.name] = list(filter(None, (row(map(_cell, line)) for line in lines)))
    if not any(tables.values()):
        return Converted("", note=left_out(kinds))
    parts = ["\n".join([name, "", *rows]).strip() for name, rows in tables.items()]
    return Converted.of(parts, "sheet", left_out(kinds))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return str(value).upper()
    return f"{value:.15g}" if isinstance(value, float) else str(value)  # digits as Excel keeps them


def pptx(data: bytes) -> Converted:
    """The text of slides, in the order in which its shapes were drawn, and their notes."""
    archive, kinds, slides = Archive(data), set[str](), list[str]()
    deck = "ppt/presentation.xml"
    targets = _targets(archive, deck)
    for entry in named(archive.xml(deck), "sldId"):
        _, part = targets[next(value for name, value in entry.attrib.items() if name.endswith("}id"))]
        root = archive.xml(part)
        kinds |= {LEFT_OUT[local(element)] for element in named(root, *LEFT_OUT)}
        blocks = list(_blocks(_once(root)))
        for kind, beside in _targets(archive, part).values():
            if kind.endswith("/notesSlide"):
                notes = "\n".join(_blocks(_once(archive.xml(beside))))
                blocks += [f"Notes: {notes}"] if notes else []
            elif kind.endswith("/comments"):
                kinds.add("comments")
        slides.append("\n\n".join(blocks))
    return Converted.of(slides, "slide", left_out(kinds))


def _targets(archive: Archive, part: str) -> dict[str, tuple[str, str]]:
    """The kind and name of each part that one refers to, by its id there."""
    folder, name = posixpath.split(part)
    beside = f"{folder}/_rels/{name}.rels"
    return {
        one.get("Id", ""): (one.get("Type", ""), _join(folder, one.get("Target", "")))
        for one in (archive.xml(beside) if beside in archive.names else ())
    }


def _join(folder: str, path: str) -> str:
    return posixpath.normpath(posixpath.join("/", folder, urllib.parse.unquote(path))).lstrip("/")


def _once(root: ET.Element) -> ET.Element:
    """The same without what says once more, for other programs, what is said before it."""
    for element in list(named(root, "AlternateContent")):
        element[:] = next(([one] for one in element if _paragraph(one)), [])
    return root


def _blocks(element: ET.Element) -> Iterator[str]:
    """The texts of shapes and tables."""
    name = local(element)
    if name == "sp" and any(place.get("type") in NO_TEXT for place in named(element, "ph")):
        return
    if name == "txBody":
        text = "\n".join(map(_paragraph, named(element, "p"))).strip()
    elif name == "tbl":
        text = "\n".join(row(map(_paragraph, named(line, "tc"))) for line in named(element, "tr"))
    else:
        for child in element:
            yield from _blocks(child)
        return
    if text:
        yield text


def _paragraph(element: ET.Element) -> str:
    found = []
    for part in element.iter():
        name = local(part)
        if name == "t" and "drawingml" in part.tag:  # not an equation's
            found.append(part.text or "")
        elif name in ("br", "p"):
            found.append("\n")
    return "".join(found).strip()


def epub(data: bytes) -> Converted:
    """The chapters, in the order in which they are read."""
    archive, kinds, chapters = Archive(data), set[str](), list[str]()
    package = next(named(archive.xml("META-INF/container.xml"), "rootfile")).attrib["full-path"]
    root, lock = archive.xml(package), "META-INF/encryption.xml"
    locked = (
        {element.get("URI") for element in named(archive.xml(lock), "CipherReference")} if archive.has(lock) else set()
    )
    items = {item.get("id"): item for item in named(root, "item")}
    for entry in named(root, "itemref"):
        item = items[entry.get("idref")]
        if item.attrib["href"] in locked or (part := _join(posixpath.dirname(package), item.attrib["href"])) in locked:
            raise InputError("is encrypted, as books that were bought often are")
        if "html" in item.get("media-type", "html"):
            _, text, left = markup.of_bytes(archive.read(part))
            kinds |= left
            chapters += [text] if text else []
    return Converted.of(chapters, "chapter", left_out(kinds))
