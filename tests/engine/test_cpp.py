"""The folders of cpp/ are layers, in the order of its README's table; the server is a program of its own. And the tests in C++."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

CPP = Path(__file__).parents[2] / "cpp"
SOURCES = sorted(path.relative_to(CPP) for path in CPP.rglob("*") if path.suffix in (".h", ".cpp"))
ENGINE = [path for path in SOURCES if path.parts[0] != "server"]


def folders() -> list[str]:
    """The folders in the order of the README's table, below the headers that llama.cpp's files and C callers include."""
    table = (CPP / "README.md").read_text(encoding="utf-8").split("| folder |")[1].split("\n\n")[0]
    return [".", *re.findall(r"^\| `([a-z]+)/` \|", table, re.MULTILINE)]


def included(path: Path) -> list[Path]:
    """What a file includes of cpp/, by its path there."""
    names = re.findall(r'^#include "([^"]+)"', (CPP / path).read_text(encoding="utf-8"), re.MULTILINE)
    return [Path(name) for name in names if Path(name) in ENGINE]


def test_every_folder_has_one_place_in_the_table() -> None:
    assert sorted(folders()) == sorted({path.parent.as_posix() for path in ENGINE})


def test_a_file_names_its_includes_from_the_top() -> None:
    names = {path.name for path in ENGINE if path.parent != Path()}
    for path in ENGINE:
        text = (CPP / path).read_text(encoding="utf-8")
        assert not names & set(re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)), path


def test_no_include_leads_to_a_folder_further_down() -> None:
    order = folders()
    downwards = [
        (path.as_posix(), other.as_posix())
        for path in ENGINE
        for other in included(path)
        if order.index(other.parent.as_posix()) > order.index(path.parent.as_posix())
    ]
    assert not downwards


def test_files_of_a_folder_form_no_circle() -> None:
    """A header and its source count as one."""
    needs: dict[Path, set[Path]] = {}
    for path in ENGINE:
        part = path.with_suffix("")
        needs.setdefault(part, set()).update({other.with_suffix("") for other in included(path)} - {part})
    while free := [part for part, others in needs.items() if not others & needs.keys()]:
        for part in free:
            del needs[part]
    assert not needs


def test_no_include_changes_what_a_name_of_ggml_means() -> None:
    """Only llama.cpp's own files see the macros around rotations; ours are compiled with the definition that hides them."""
    redefined = re.compile(r"^ *# *(?:define|undef) +(?:ggml|llama)_[a-z]", re.MULTILINE)
    hidden = re.compile(r"^#ifndef LLAMA_PCD_OWN_SOURCE\n.*?^#endif\n", re.MULTILINE | re.DOTALL)
    for path in ENGINE:
        text = (CPP / path).read_text(encoding="utf-8")
        assert not redefined.search(hidden.sub("", text) if path.name == "llama-pcd-rope.h" else text), path
    cmake = (CPP.parent / "CMakeLists.txt").read_text(encoding="utf-8")
    (properties,) = re.findall(r"set_source_files_properties\(\$\{PYPCD_SOURCES\} ([^)]*)\)", cmake)
    assert "COMPILE_DEFINITIONS LLAMA_PCD_OWN_SOURCE" in properties


INCLUDE = Path(sysconfig.get_path("platlib")) / "include"  # of llama-cpp-python
STRICT = ["-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", "-D_GLIBCXX_ASSERTIONS"]
SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all"]
OPTIONS = re.compile(r'SOURCE "\$\{PROJECT_SOURCE_DIR\}/cpp/([^"]+)"[^)]*COMPILE_OPTIONS\s+([^)]*)\)')


@pytest.mark.skipif(not shutil.which("g++") or not (INCLUDE / "llama.h").exists(), reason="needs g++ and llama.h")
@pytest.mark.parametrize("test", [path for path in ENGINE if path.stem.endswith("_test")], ids=lambda path: path.stem)
@pytest.mark.parametrize("options", [["-O1", *SANITIZERS], ["-O3"]], ids=["sanitizers", "optimised"])
def test_what_is_pure(options: list[str], test: Path, tmp_path: Path) -> None:
    """A test is linked with the sources of its folder, which are compiled with the options that they have in CMakeLists.txt."""
    subprocess.run([sys.executable, CPP.parent / "cmake" / "fields.py", tmp_path], check=True)
    own = dict(OPTIONS.findall((CPP.parent / "CMakeLists.txt").read_text(encoding="utf-8")))
    assert own.keys() <= {path.as_posix() for path in ENGINE}
    parts = [path for path in ENGINE if path.parent == test.parent and path.suffix == ".cpp"]
    objects = [tmp_path / f"{path.stem}.o" for path in parts if path == test or not path.stem.endswith("_test")]
    common = [*STRICT, *options, f"-I{CPP}", f"-I{tmp_path}", "-isystem", INCLUDE]
    for path in parts:
        which = own.get(path.as_posix(), "").split()
        subprocess.run(["g++", *common, *which, "-c", CPP / path, "-o", tmp_path / f"{path.stem}.o"], check=True)
    subprocess.run(["g++", *options, *objects, "-o", tmp_path / "test"], check=True)
    done = subprocess.run([tmp_path / "test"], text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
