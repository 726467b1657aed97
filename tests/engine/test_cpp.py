"""The layers of cpp/: its files include each other as its README's table says."""

from __future__ import annotations

import re
from pathlib import Path

CPP = Path(__file__).parents[2] / "cpp"
FILES = sorted(path.name for path in CPP.iterdir() if path.suffix in (".h", ".cpp"))


def layers() -> list[str]:
    """The files in the order of the README's table; a name without a suffix means a header and its source."""
    table = (CPP / "README.md").read_text(encoding="utf-8").split("| layer |")[1].split("\n\n")[0]
    names = [name for row in table.splitlines()[2:] for name in re.findall(r"`(llama-pcd[^`]*)`", row.split("|")[2])]
    return [file for name in names for file in ([name] if "." in name else [f"{name}.h", f"{name}.cpp"])]


def test_every_file_has_one_place_in_the_table() -> None:
    assert sorted(layers()) == FILES


def test_a_file_includes_only_files_above_it() -> None:
    order = layers()
    downwards = [
        (name, other)
        for name in FILES
        for other in re.findall(r'#include "(llama-pcd[^"]*)"', (CPP / name).read_text(encoding="utf-8"))
        if order.index(other) > order.index(name)
    ]
    assert not downwards


def test_lines_stay_readable() -> None:
    of_server = [
        path.relative_to(CPP).as_posix() for path in (CPP / "server").iterdir() if path.suffix in (".h", ".cpp")
    ]
    assert of_server
    for name in [*FILES, *of_server]:
        lines = (CPP / name).read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines)) <= 140, name
