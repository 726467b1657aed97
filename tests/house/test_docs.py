"""README and docs against the code and files they describe: links, commands, settings, file names, quoted messages."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import itertools
import pathlib
import re
import shlex
import sys

import pytest

from pypcd import PCDConfig, cli, decode, evaluation
from pypcd.settings.ranges import literal

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "cmake"))

import fields

PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / name for name in ("cpp/README.md", "pypcd/models/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/lab").glob("*.md")),
]
if not all(page.exists() for page in PAGES):
    pytest.skip("the pages lie in a checkout only", allow_module_level=True)


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code_blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each block of code, fenced or indented."""
    found = [(m[2], m[3]) for m in re.finditer(r"(?ms)^( *)```(\w*)\n(.*?)^\1```", text)]
    text = re.sub(r"(?ms)^( *)```.*?^\1```\n", "", text)
    return found + [("", m[0]) for m in re.finditer(r"(?m)(?:^ {4,}\S.*\n?)+", text)]


# -- links ------------------------------------------------------------------------------------------------------------


def test_the_readme_leads_to_every_page() -> None:
    """At once, or by one page between."""
    links = {page: set(re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))) for page in PAGES}
    files = {page: {(page.parent / target).resolve() for target in targets} for page, targets in links.items()}
    near = files[ROOT / "README.md"]
    far = set().union(*(files.get(page, set()) for page in near))
    assert set(PAGES) - {ROOT / "README.md"} <= near | far


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors that GitHub makes from headings."""
    text = re.sub(r"(?ms)^```.*?^```\n", "", page.read_text(encoding="utf-8"))
    found = set()
    for m in re.finditer(r"(?m)^#+ +(.*)$", text):
        heading = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", m[1])
        found.add(re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        assert ROOT in file.parents, f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading; there are {sorted(anchors(file))}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: pathlib.Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if "in commit 7d6ac68" not in line)  # which has them still
    named = re.findall(r"(?<![\w/])scripts/[\w./]*\w", text)
    if page.name == "tour.md":
        named += re.findall(r"`((?:pypcd|cpp|tests|docs)/[\w./-]*)`", text)
    for name in named:
        assert (ROOT / name).exists(), name


# -- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_is_python(page: pathlib.Path) -> None:
    for language, text in code_blocks(page.read_text(encoding="utf-8")):
        if language == "python":
            ast.parse(text)


def commands(page: pathlib.Path) -> list[str]:
    """The command lines of pypcd in blocks of code, comments and the running text."""
    text = page.read_text(encoding="utf-8")
    lines = [line for _, block in code_blocks(text) for line in block.splitlines()]
    lines += [m[1] for m in re.finditer(r"(?s)<!-- (.*?) -->", text)]
    lines += [" ".join(m[1].split()) for m in re.finditer(r"(?<!`)`(pypcd\s[^`]+)`(?!`)", text)]
    parts = itertools.chain.from_iterable(re.split(r"\s(?:\||&&)\s", line.strip()) for line in lines)
    return [part for part in parts if part.startswith("pypcd ")]


COMMANDS = [(name_of(page), line) for page in PAGES for line in dict.fromkeys(commands(page))]


def test_commands_are_found() -> None:
    assert len(COMMANDS) >= 40 and "README.md" in {page for page, _ in COMMANDS}


@pytest.mark.parametrize("page, line", COMMANDS)
def test_commands_parse(page: str, line: str) -> None:
    words = shlex.split(line.replace("…", "X"), comments=True)[1:]
    words = words[: words.index("--")] if "--" in words else words  # what follows is llama-server's
    if words[0] in ("COMMAND", "--help"):
        return
    name = words[0]
    if page == "CHANGELOG.md" and name in cli._MOVED:  # history
        return
    assert name in cli.COMMANDS
    parser = argparse.ArgumentParser(prog=f"pypcd {name}")
    if len(words) == 1:  # named, not run
        return
    cli.module_of(name).add_arguments(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = parser.parse_args(words[1:])
    except SystemExit as stop:
        assert not stop.code, f"{line}\n{said.getvalue()}"
        return
    setting = getattr(args, "pcd", None)
    if setting is not None and setting != "SETTING" and not setting.endswith(".json"):
        PCDConfig.resolve(setting)
    for name in (getattr(args, "method", None) or "").split(","):
        if name:
            decode.parse(name)
    for name in (getattr(args, "task", None) or "").split(","):
        if name:
            assert name in evaluation.GROUPS or name in evaluation.TASKS


# -- docs/settings.md -------------------------------------------------------------------------------------------------


def table(page: str, first: str) -> list[dict[str, str]]:
    """The table whose first column is called `first`; cells without the marks of code."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))
    head, _, *body = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert all(len(row) == len(head) for row in body)
    return [dict(zip(head, (cell.replace("`", "") for cell in row))) for row in body]


def test_the_table_of_fields_is_the_one_that_is_made() -> None:
    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    assert text == fields.page(text), "python cmake/fields.py --docs mends it"


def test_presets_have_the_values_of_the_table() -> None:
    rows = {row["name"]: row["values"] for row in table("docs/settings.md", "name")}
    for name, values in rows.items():
        changes = {} if "=" not in values else dict(word.split("=") for word in values.split(":"))
        made = PCDConfig().replace(**{field: literal(value) for field, value in changes.items()})
        assert PCDConfig.preset(name) == made, name
    with pytest.raises(ValueError) as error:
        PCDConfig.preset("!")
    assert set(re.findall(r"\w+", str(error.value).partition("allowed: ")[2])) == set(rows)


# -- docs/troubleshooting.md ------------------------------------------------------------------------------------------


def test_quoted_messages_are_the_programs() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    sources = [
        *ROOT.glob("pypcd/**/*.py"),
        *ROOT.glob("cpp/**/*.cpp"),
        *ROOT.glob("cmake/*.cmake"),
        ROOT / "CMakeLists.txt",
    ]
    said = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    said = re.sub(r'"\s*\n\s*f?"', "", said).replace("\\n", "")  # a text over several lines of source
    quoted = [text for m in re.finditer(r"(?m)^\*\*You see\*\*.*$", page) for text in re.findall(r"`([^`]+)`", m[0])]
    quoted += [m[1] for m in re.finditer(r"(?m)^\| `([^`]+)` \|", page)]
    not_ours = ("CMAKE_CXX_COMPILER", "CMake 3.21", "LLAMA_CPP_LIB_PATH", "pypcd info")
    fragments = [
        part.strip()
        for text in quoted
        if not any(word in text for word in not_ours)
        for part in re.split("…", text)
        if len(part.strip()) >= 12
    ]
    assert len(fragments) > 10
    for fragment in fragments:
        assert fragment in said, f"no source says {fragment!r}"
