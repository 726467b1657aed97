"""scripts/docs: the pages that it makes. That the site is sound is checked where it is built, by MkDocs (.ci/run)."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest

import pypcd
from pypcd import cli

ROOT = Path(__file__).parents[2]
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("the pages lie in a checkout only", allow_module_level=True)
sys.path.insert(0, str(ROOT / "scripts/reference"))

import c_api
import pages


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    pages.write(folder)
    return folder


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_once(site: Path) -> None:
    nav = text_of(ROOT / "mkdocs.yml").partition("\nnav:\n")[2].partition("\n\n")[0]
    named = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    made = (page.relative_to(site).as_posix() for page in site.rglob("*.md"))
    assert sorted(named) == sorted(
        page for page in made if not page.startswith("docs/evidence/")
    )  # tables: linked alone


def test_pages_lie_as_in_the_repository_with_what_they_link_to(site: Path) -> None:
    for name in ("README.md", "docs/settings.md", "docs/page.png", "docs/nginx.conf", "cpp/README.md"):
        assert (site / name).is_file() and (ROOT / name).is_file(), name
    links = 0
    for page in site.rglob("*.md"):
        for target in re.findall(r"\]\(([^)\s#:]+)[^):]*\)", text_of(page)):
            assert (page.parent / target).exists(), f"{page.relative_to(site)}: {target}"
            links += 1
    assert links > 100


def test_all_public_names_and_commands_are_in_the_reference(site: Path) -> None:
    page = text_of(site / "reference/pypcd.md")
    assert sorted(re.findall(r"^::: pypcd\.([A-Za-z]\w*)$", page, re.MULTILINE)) == sorted(pypcd.__all__)
    assert "`tokenize(self, text: " in page  # inherited from llama_cpp.Llama
    commands = text_of(site / "reference/commands.md")
    for name in cli.COMMANDS:
        assert f"\n## {name}\n" in commands and f"usage: pypcd {name}" in commands
    assert max(map(len, commands.splitlines())) <= 80


def test_all_of_the_c_api_is_in_the_reference(site: Path) -> None:
    header = "\n".join(text_of(ROOT / "cpp" / name) for name in pages.HEADERS)
    page = text_of(site / "reference/c.md")
    declared = set(re.findall(r"(llama_\w*pcd\w*) ?\(", re.sub(r"//.*", "", header)))
    declared |= set(re.findall(r"^(?:enum|struct|#define) (\w+)", header, re.MULTILINE))
    titles = {name for title in re.findall(r"^## ([\w, ]+) {", page, re.MULTILINE) for name in title.split(", ")}
    assert len(declared) > 50 and declared <= titles
    words = re.compile(r"[a-z]{4,}")  # nothing is lost on the way
    said = set(words.findall(page.lower()))
    for comment in re.findall(r"// (.*)", header.lower()):
        assert set(words.findall(comment)) <= said, comment


def test_lists_are_as_python_markdown_wants_them() -> None:
    assert pages.spaced("Why\nnot:\n- one\n- two\n") == "Why\nnot:\n\n- one\n- two\n"
    assert (
        pages.spaced("- one\n  more\n\n  ```sh\n  ls\n  ```\n- two\n")
        == "- one\n    more\n\n    ```sh\n    ls\n    ```\n- two\n"
    )
    assert pages.spaced("- one\n\n  more\n- two\n") == "- one\n\n    more\n\n- two\n"
    for same in (
        "# Title\n- one\n",
        "- one\n\nText\n\n    code\n",
        "Text\n\n1. one\n2. two\n",
        "```sh\nls\n- no list\n```\n",
    ):
        assert pages.spaced(same) == same
    for page in itertools.chain(ROOT.glob("*.md"), ROOT.glob("docs/*.md"), ROOT.glob("docs/lab/*.md")):
        assert pages.spaced(text_of(page)).split() == text_of(page).split()


HEADER = """\
// All of it.

#pragma once

// how far * it goes
#define X_FAR 3

enum x_kind {
    X_ONE = 0, // the first

    X_TWO = 1,
};

// Calls x_take() with L*, see enum x_kind.
//
//     a = b
LLAMA_API void x_go(
        int n);
LLAMA_API int * x_take (int n); // two at once

typedef void (*x_callback)(int n);
"""

PAGE = r"""# C API

All of it.

## X_FAR { #X_FAR }

```c
#define X_FAR 3
```

How far \* it goes

## x_kind { #x_kind }

```c
enum x_kind {
    X_ONE = 0, // the first

    X_TWO = 1,
};
```

## x_go, x_take { #x_go }

```c
LLAMA_API void x_go(
        int n);
LLAMA_API int * x_take (int n); // two at once
```

Calls `x_take()` with L\*, see enum [`x_kind`](#x_kind).

    a = b

## x_callback { #x_callback }

```c
typedef void (*x_callback)(int n);
```
"""


def test_a_header_becomes_a_page() -> None:
    assert c_api.page(HEADER) == PAGE


def test_a_declaration_of_another_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="'int x;' is no declaration that is known here; allowed: enum, struct"):
        c_api.page("// a\nint x;\n")
