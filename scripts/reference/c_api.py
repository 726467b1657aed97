"""A page on a C header: each declaration as it stands, with the comment before it as its text. Knows nothing of PCD.

What it reads: comments of whole lines directly before what they are about, and declarations with an empty line between two, but
where one comment is about several. The comment that begins the file is about all of it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["page"]

LEFT_OUT = re.compile(r'#(pragma|include|ifdef|ifndef|endif)\b|extern "C" {|}$')
# a type, a macro, a pointer to a function, a function
NAME = re.compile(r"^(?:enum|struct) (\w+) {|^#define (\w+)|^typedef .*\(\*(\w+)\)|^\w[^(]*?(\w+) *\(")
WORD = re.compile(r"(?<!\w)(\w+_\w+)(\*|\(\))?|([*_<>~`\[\]\\])")  # a name in code, or a mark of Markdown


class Part(NamedTuple):
    """A comment, and the declarations that it is about: none for a remark on the whole header."""

    comment: list[str]
    code: list[str]

    def names(self) -> list[str]:
        """Of the declarations."""
        begins = [line for line in self.code if line and line[0] not in " }"]
        found = [NAME.match(line) for line in begins]
        for line, match in zip(begins, found):
            if not match:
                raise ValueError(
                    f"{line!r} is no declaration that is known here; allowed: enum, struct, #define, typedef, a function"
                )
        return [next(filter(None, match.groups())) for match in found if match]


def page(header: str) -> str:
    """The page, in Markdown.

    Raises:
        ValueError: a declaration is none of those that are known here.
    """
    parts = [part for part in split(header) if part.comment or part.code]
    homes = {name: part.names()[0] for part in parts if part.code for name in part.names()}
    text = ["# C API"]
    for part in parts:
        if part.code:
            text += [f"## {', '.join(part.names())} {{ #{part.names()[0]} }}", "\n".join(("```c", *part.code, "```"))]
        text += paragraphs(part.comment, {name: home for name, home in homes.items() if name not in part.names()})
    return "\n\n".join(text) + "\n"


def split(header: str) -> list[Part]:
    parts = [Part([], [])]
    inside = False  # a declaration of several lines
    for line in header.splitlines():
        if inside:
            parts[-1].code.append(line)
            inside = not line.startswith("}") and not line.endswith(");")
        elif not line or LEFT_OUT.match(line):
            parts.append(Part([], []))
        elif line.startswith("//"):
            parts[-1].comment.append(line[2:].removeprefix(" "))
        else:
            parts[-1].code.append(line)
            inside = line.endswith(("{", "(", ","))
    return parts


def paragraphs(comment: list[str], homes: dict[str, str]) -> list[str]:
    """The paragraphs of a comment; what is indented stays as it is, and names lead to where they are declared."""
    found: list[list[str]] = [[]]
    for line in comment:
        if not line or (found[-1] and line.startswith("    ") != found[-1][-1].startswith("    ")):
            found.append([])
        if line:
            found[-1].append(line)

    def marked(match: re.Match[str]) -> str:
        name, after, sign = match.groups()
        if sign:
            return f"\\{sign}"
        code = f"`{name}{after or ''}`"
        return f"[{code}](#{homes[name]})" if name in homes else code

    made = []
    for lines in filter(None, found):
        if lines[0].startswith("    "):
            made.append("\n".join(lines))
        else:
            text = " ".join(lines)
            made.append(WORD.sub(marked, text if made else capital(text)))
    return made


def capital(text: str) -> str:
    """With a capital, where it begins with an ordinary word."""
    return text[0].upper() + text[1:] if re.match(r"[a-z]+,? (?!=)", text) else text
