"""What the site of the documentation has beside docs/: a hook of MkDocs (mkdocs.yml).

All pages lie as in the repository, so that a link from one to another is the same in both. The reference is made of the public names
of each package by mkdocstrings, of the help of each command, and of the header of the C API as it stands.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from pypcd import PCDConfig, cli

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "cmake"))

import fields

# those outside docs/
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "cpp/README.md", "pypcd/models/README.md")
HEADERS = ("llama-pcd.h",)
PACKAGES = ("pypcd", "pypcd.ask", "pypcd.decode", "pypcd.evaluation", "pypcd.bench")
ITEM = re.compile(r" *([-*]|\d+\.) ")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    paths = [path for path in Path(config.docs_dir).resolve().rglob("*") if path.is_file()] + [
        ROOT / name for name in PAGES
    ]
    for page in [path for path in paths if path.suffix == ".md"]:
        paths += [path for path in linked(page) if path not in paths]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)) for path in paths]
    made = [File.generated(config, f"reference/{name}.md", content=text) for name, text in reference()]
    return Files([*theme, *ours, *made])


def on_page_markdown(markdown: str, **_: Any) -> str:
    return spaced(markdown)


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for target in re.findall(r"\]\(([^)\s#:]+)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        if path.is_file() and ROOT in path.parents:
            yield path


def spaced(text: str) -> str:
    """With lists as Python-Markdown wants them: behind an empty line, and what belongs to an item indented by four."""
    lines: list[str] = []
    fenced = in_list = False
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


def setting() -> str:
    """PCDConfig: its signature would be the code of pypcd/settings/fields.py."""
    methods = (name for name in vars(PCDConfig) if name[0] != "_" and callable(getattr(PCDConfig, name, None)))
    return "\n\n".join(
        (
            "::: pypcd.PCDConfig\n    options: {show_signature: false, show_bases: false, members: false}",
            "Its arguments, with defaults and ranges, are [the fields of a setting](../docs/settings.md#values).",
            *(f"::: pypcd.PCDConfig.{name}\n    options: {{heading_level: 3}}" for name in methods),
        )
    )


def reference() -> Iterator[tuple[str, str]]:
    """Pages of it, with their names."""
    for name in PACKAGES:
        names = sorted(importlib.import_module(name).__all__, key=lambda n: (not n[0].isupper() or n.isupper(), n))
        parts = [f"# {name}", f"::: {name}\n    options: {{show_root_heading: false, members: false}}"]
        members = (setting() if member == "PCDConfig" else f"::: {name}.{member}" for member in names)
        yield name.rpartition(".")[2], "\n\n".join([*parts, *members])
    with mock.patch.dict(os.environ, COLUMNS="80", NO_COLOR="1"):
        parser, commands = cli.make_parser(cli.COMMANDS)
        helps = {"# Commands": parser, **{f"## {name}": command for name, command in commands.items()}}
        yield "commands", "\n\n".join(f"{title}\n\n```text\n{of.format_help()}```" for title, of in helps.items())
    parts = ["# C API"]
    headers = {name: (ROOT / "cpp" / name).read_text(encoding="utf-8") for name in HEADERS}
    for name, text in {**headers, "llama-pcd-fields.h": fields.header()}.items():
        parts.append(f"## {name}\n\n```c\n{text}```")
    yield "c", "\n\n".join(parts)
