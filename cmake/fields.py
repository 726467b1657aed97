"""Writes what C, C++ and the docs have of the fields of a setting, from pypcd/settings/fields.py, which states them.

python cmake/fields.py FOLDER     # llama-pcd-fields.h and llama-pcd-fields.inc, into a build folder
python cmake/fields.py --docs     # the table in docs/settings.md
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # this tree's, whatever is installed

from pypcd.settings.fields import FIELDS, Field
from pypcd.settings.ranges import Integer, Number, OrNone

PAGE = ROOT / "docs/settings.md"
WIDTH = 130


# -- C -------------------------------------------------------------------------------------------------------------------


def header() -> str:
    """The C header: an enum for each field whose values are names, and the struct."""
    lines = [
        "// Made by cmake/fields.py from pypcd/settings/fields.py: the fields of a setting.",
        "",
        "#pragma once",
        "",
    ]
    lines += ["#include <stdbool.h>", "#include <stdint.h>", ""]
    for field in FIELDS.values():
        if field.is_choice and field.name != "type_k_over":  # that one has ggml's own enum
            lines += [f"// the values of llama_pcd_params.{field.name}", f"enum {enum(field)} {{"]
            lines += [f"    {enum(field).upper()}_{word(name)} = {number}," for name, number in field.numbers.items()]
            lines += ["};", ""]
    lines += ["// A setting. Its fields are those of pypcd.PCDConfig, and one more.", "struct llama_pcd_params {"]
    for field in FIELDS.values():
        lines += [*comment(f"{field.what} {numbers(field)}"), f"    {c_type(field)} {field.name};", ""]
    lines += [
        *comment("false leaves the standard rows in place, for llama_sampler_init_pcd()"),
        "    bool combine;",
        "};",
    ]
    return "\n".join(lines) + "\n"


def table() -> str:
    """The rows of the array pcd_fields in cpp/twins/settings.h."""
    return "// Made by cmake/fields.py from pypcd/settings/fields.py\n" + "".join(
        f"{row(field)}\n" for field in FIELDS.values()
    )


def row(field: Field) -> str:
    member = f"&llama_pcd_params::{field.name}"
    members = ("nullptr", member) if field.is_float else (member, "nullptr")
    low, high, is_open = ends(field)
    named = ", ".join(
        f"{{ {number}, {'nullptr' if name is None else quoted(name)} }}" for name, number in field.numbers.items()
    )
    default = repr(field.to_number(field.default))
    values = [quoted(field.name), *members, default, low, high, is_open, f"{{ {named} }}", boolean(field.own)]
    return f"{{ {', '.join(values)} }},"


def ends(field: Field) -> tuple[str, str, str]:
    """The lowest and the highest number, and whether the lowest itself is left out."""
    kind = field.range.kind if isinstance(field.range, OrNone) else field.range
    if field.is_choice:
        return repr(min(field.numbers.values())), repr(max(field.numbers.values())), "false"
    assert isinstance(kind, (Number, Integer))
    low = min([kind.low, *field.numbers.values()])
    return repr(low), repr(kind.high), boolean(isinstance(kind, Number) and kind.open_below)


def c_type(field: Field) -> str:
    return "float" if field.is_float else "int32_t"


def enum(field: Field) -> str:
    return f"llama_pcd_{field.name}"


def numbers(field: Field) -> str:
    """What is allowed, and what stands for it."""
    if field.name == "type_k_over":
        return f"Allowed, of enum ggml_type: {', '.join(filter(None, field.numbers))}. None is {field.numbers[None]}."
    if field.is_choice:
        return f"Allowed: enum {enum(field)}."
    return f"Allowed: {field.range.allowed}." + (f" None is {field.numbers[None]}." if None in field.numbers else "")


def word(name: str | None) -> str:
    return "NONE" if name is None else name.upper().replace("-", "_")


def quoted(text: str) -> str:
    return f'"{text}"'


def boolean(value: bool) -> str:
    return "true" if value else "false"


def comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text.replace("`", ""), WIDTH - 7, break_on_hyphens=False):
        yield f"    // {line}"


# -- the docs ------------------------------------------------------------------------------------------------------------


def page(text: str) -> str:
    """A page with the table in it, in place of the one that it has."""
    before, head, rest = text.partition("| field | default |")
    assert head, "the page has no table of fields"
    return before + docs() + "".join(re.split(r"(?<=\n)(?!\|)", rest, maxsplit=1)[1:])


def docs() -> str:
    """The table of docs/settings.md."""
    lines = ["| field | default | allowed | what it does |", "| --- | --- | --- | --- |"]
    for field in FIELDS.values():
        default = f"{field.default:g}" if field.default == 1e-4 else field.default
        cells = (f"`{field.name}`", str(default), field.range.allowed.replace("'", ""), field.what)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(target: str) -> None:
    if target == "--docs":
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    folder = Path(target)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("llama-pcd-fields.h", header()), ("llama-pcd-fields.inc", table())):
        file = folder / name
        if (
            not file.exists() or file.read_text(encoding="utf-8") != text
        ):  # else all that includes it would be compiled again
            file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
