"""Which pages the site has. Knows nothing of the program that makes a site of them.

They lie as in the repository, so that a link from one to another is the same in both. The reference is made here: of the
public names of each package, of the help of each command, and of the header of the C API.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import c_api

import pypcd
from pypcd import cli

# isort: split
import llama_cpp

__all__ = ["ROOT", "write"]

ROOT = Path(__file__).resolve().parent.parent.parent
# those outside docs/
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "cpp/README.md", "pypcd/models/README.md")
HEADERS = ("llama-pcd.h", "llama-pcd-extras.h", "llama-pcd-bench.h")
PACKAGES = ("pypcd", "pypcd.decode", "pypcd.evaluation", "pypcd.bench", "pypcd.lab")
ITEM = re.compile(r" *([-*]|\d+\.) ")


def write(folder: Path) -> None:
    """All pages and what they show or link to, into a folder that is not there yet."""
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in PAGES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for page in list(folder.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        page.write_text(spaced(text), encoding="utf-8")
        for file in linked(ROOT / page.relative_to(folder), text):
            there = folder / file.relative_to(ROOT)
            if not there.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, there)
    shutil.copy(Path(__file__).parent / "site.css", folder)
    reference = folder / "reference"
    reference.mkdir()
    for name in PACKAGES:
        (reference / f"{name.rpartition('.')[2]}.md").write_text(package(name), encoding="utf-8")
    (reference / "commands.md").write_text(commands(), encoding="utf-8")
    headers = ((ROOT / "cpp" / name).read_text(encoding="utf-8") for name in HEADERS)
    (reference / "c.md").write_text(c_api.page("\n".join(headers)), encoding="utf-8")


def linked(page: Path, text: str) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for target in re.findall(r"\]\(([^)\s#:]+)", text):
        file = (page.parent / target).resolve()
        if file.is_file() and ROOT in file.parents:
            yield file


def spaced(text: str) -> str:
    """With lists as Python-Markdown wants them: behind an empty line, and what belongs to an item indented by four."""
    lines: list[str] = []
    fenced = False
    in_list = False
    before = ""  # what the line before belongs to: a paragraph, an item of a list, or nothing of the kind
    for line in text.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith("```")
        is_item = not fenced and ITEM.match(line) is not None
        if is_item and before == "paragraph":
            lines.append("\n")
        if is_item:
            before = "item"
        elif fenced or not line.strip() or line.lstrip()[0] in "#|<`":
            before = ""
        elif before != "item":
            before = "paragraph"
        in_list = is_item or (in_list and (line[0] in " \n" or before == "item"))
        lines.append("  " + line if in_list and line.startswith("  ") and not is_item else line)
    return "".join(lines)


def package(name: str) -> str:
    """A page on the public names of a package, for mkdocstrings to fill in: classes, then the rest, then exceptions."""
    module = importlib.import_module(name)
    errors = [
        n for n in module.__all__ if isinstance(getattr(module, n), type) and issubclass(getattr(module, n), Exception)
    ]
    parts = [f"# {name}", docstring_of(name)]
    for member in sorted(set(module.__all__) - set(errors), key=lambda n: (not n[0].isupper() or n.isupper(), n)):
        parts.append(f"::: {name}.{member}")
        if member == "Llama":
            parts.append(inherited(pypcd.Llama, llama_cpp.Llama))
    if errors:
        parts += ["## Exceptions", docstring_of(f"{name}._errors")]
        parts += [f"::: {name}.{member}\n    options: {{heading_level: 3}}" for member in errors]
    return "\n\n".join(parts) + "\n"


def docstring_of(module: str) -> str:
    return f"::: {module}\n    options: {{show_root_heading: false, show_root_toc_entry: false, members: false}}"


def inherited(kind: type, base: type) -> str:
    """What a class has from its base as it is there: signatures, and the first line of each docstring."""
    parts = [f"### Inherited from {base.__module__.partition('.')[0]}.{base.__name__}"]
    for name in sorted(name for name in vars(base) if name[0] != "_" and name not in vars(kind)):
        thing = getattr(base, name)
        about = (inspect.getdoc(thing) or "").partition("\n")[0]
        signature = "" if isinstance(thing, property) else str(inspect.signature(thing))
        parts.append(f"- `{name}{signature}`" + (f"  \n    {about}" if about else ""))
    return "\n\n".join(parts)


def commands() -> str:
    """A page with what `pypcd COMMAND --help` prints."""
    with mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"):
        return _commands()


def _commands() -> str:
    parser, made = cli.make_parser([*cli.COMMANDS, *cli.LAB])
    parts = ["# Commands", f"```text\n{parser.format_help()}```"]
    for name, command in made.items():
        parts += [f"## {name}", f"```text\n{command.format_help()}```"]
    return "\n\n".join(parts) + "\n"
