"""Files that the tests of documents read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# a line of text, its size, and where it begins, in points from the left and from below
Placed = tuple[str, int, int, int]


def pdf(*pages: str | Sequence[Placed], letters: Mapping[str, str] | None = None, encrypt: bool = False) -> bytes:
    """A PDF with these pages of lines, in a font whose letters are .6 of its size wide. A page of a text has room for 79 of them between even
    margins, in lines that are 12 points apart.

    Args:
        letters: what some letters stand for, in UTF-16 as hexadecimal digits.
        encrypt: with a password that nobody knows.
    """
    n = len(pages)
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in range(n))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {n} >>"]
    map_at = f" /ToUnicode {3 + 2 * n} 0 R" if letters else ""
    font = f"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Courier{map_at} >> >> >>"
    for i, page in enumerate(pages):
        lines = [(t, 10, 60, 780 - 12 * k) for k, t in enumerate(page.split("\n"))] if isinstance(page, str) else page
        shown = "".join(f"/F1 {size} Tf 1 0 0 1 {x} {y} Tm ({text}) Tj " for text, size, x, y in lines)
        stream = f"BT {shown}ET"
        box = "/MediaBox [0 0 594 842]"
        objects += [
            f"<< /Type /Page /Parent 2 0 R {box} /Resources {font} /Contents {4 + 2 * i} 0 R >>",
            f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
        ]
    if letters:
        codes = {chr(code): f"{code:04x}" for code in range(32, 127)} | dict(letters)
        rows = "\n".join(f"<{ord(letter):02x}> <{code}>" for letter, code in codes.items())
        table = f"begincmap\n1 begincodespacerange <00> <ff> endcodespacerange\n{len(codes)} beginbfchar\n{rows}\nendbfchar\nendcmap"
        objects.append(f"<< /Length {len(table)} >>\nstream\n{table}\nendstream")
    data, places = b"%PDF-1.4\n", []
    for number, text in enumerate(objects, 1):
        places.append(len(data))
        data += f"{number} 0 obj\n{text}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    lock = (
        f"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <{'0' * 64}> /U <{'0' * 64}> >> /ID [<00> <00>]"
        if encrypt
        else ""
    )
    root = f"<< /Size {size} /Root 1 0 R {lock} >>"
    tail = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n{root}\nstartxref\n{len(data)}\n%%EOF\n"
    return data + tail.encode()
