"""The site of scripts/docs: the pages that are made for it. Links and navigation are checked where it is built, by MkDocs (.ci/run)."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from conftest import module_at

import pypcd
from pypcd import cli

pytest.importorskip("mkdocs", reason="scripts/install docs brings it")
from mkdocs.config import load_config
from mkdocs.structure.files import get_files

ROOT = Path(__file__).parents[2]
if not (ROOT / "mkdocs.yml").exists():
    pytest.skip("the pages lie in a checkout only", allow_module_level=True)


def test_all_public_names_and_commands_are_in_the_reference() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"))
    files = config.plugins.on_files(get_files(config), config=config)
    site = {file.src_uri: file.content_string for file in files if file.is_documentation_page()}
    page = site["reference/pypcd.md"]
    assert sorted(re.findall(r"^::: pypcd\.([A-Za-z]\w*)$", page, re.MULTILINE)) == sorted(pypcd.__all__)
    commands = site["reference/commands.md"]
    for name in cli.COMMANDS:
        assert f"\n## {name}\n" in commands and f"usage: pypcd {name}" in commands
    assert (ROOT / "cpp/llama-pcd.h").read_text(encoding="utf-8") in site["reference/c.md"]


def test_lists_are_as_python_markdown_wants_them() -> None:
    pages = module_at(ROOT / "scripts/pages.py")
    for text, wanted in (
        ("Why\nnot:\n- one\n- two\n", "Why\nnot:\n\n- one\n- two\n"),
        ("- one\n  more\n\n  ```sh\n  ls\n  ```\n- two\n", "- one\n    more\n\n    ```sh\n    ls\n    ```\n- two\n"),
        ("- one\n\n  more\n- two\n", "- one\n\n    more\n\n- two\n"),
    ):
        assert pages.spaced(text) == wanted
    for same in (
        "# Title\n- one\n",
        "- one\n\nText\n\n    code\n",
        "Text\n\n1. one\n2. two\n",
        "```sh\nls\n- no list\n```\n",
    ):
        assert pages.spaced(same) == same
    for page in itertools.chain(ROOT.glob("*.md"), ROOT.glob("docs/*.md")):
        assert pages.spaced(page.read_text(encoding="utf-8")).split() == page.read_text(encoding="utf-8").split()
