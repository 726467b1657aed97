"""cmake/apply_patch.py against git."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import find_sdist

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "cmake"))

import apply_patch

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is what it is compared with")


def git(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent), "GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(
        ["git", *arguments], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, check=True
    ).stdout


@pytest.mark.parametrize("part, folder", [("cpp", "src"), ("server", "tools/server")])
def test_the_hooks_are_applied_as_git_does(
    part: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = ROOT / f"cpp/patches/llama-{part}-hooks.patch"
    folders = tmp_path / "git", tmp_path / "mine"
    with tarfile.open(find_sdist()) as archive:
        for member in archive:
            _, _, name = member.name.partition("/vendor/llama.cpp/")
            if name.startswith(f"{folder}/") and member.isfile():
                content = archive.extractfile(member)
                assert content
                (folders[0] / name).parent.mkdir(parents=True, exist_ok=True)
                (folders[0] / name).write_bytes(content.read())
    shutil.copytree(*folders)
    before = contents(folders[0])
    git(folders[0], "apply", str(patch))
    assert apply_patch.main(str(patch), str(folders[1])) == 0
    assert contents(folders[1]) == contents(folders[0]) != before
    assert apply_patch.main(str(patch), str(folders[1])) == 0
    assert capsys.readouterr().out == "applied\napplied already\n" and contents(folders[1]) == contents(folders[0])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("seed", range(5))
def test_a_patch_fits_where_lines_moved_and_nowhere_else(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    repo, mine = tmp_path / "repo", tmp_path / "mine"
    lines = [f"line {rng.randrange(40)}" for _ in range(200)]
    changed = [f"new {i}" if rng.random() < 0.05 else line for i, line in enumerate(lines) if rng.random() > 0.02]
    moved = [f"ahead {i}" for i in range(7)] + lines
    for folder in (repo, mine):
        folder.mkdir()
    git(repo, "init", "--quiet")

    def write(folder: Path, text: list[str]) -> None:
        (folder / "ä file").write_text("\n".join(text) + "\n", encoding="utf-8")

    write(repo, lines)
    git(repo, "add", ".")
    write(repo, changed)
    patch = tmp_path / "p"
    patch.write_text(git(repo, "-c", "core.quotepath=off", "diff"), encoding="utf-8")
    write(repo, moved)
    write(mine, moved)
    git(repo, "apply", str(patch))
    assert apply_patch.main(str(patch), str(mine)) == 0
    assert (mine / "ä file").read_bytes() == (repo / "ä file").read_bytes()

    write(mine, ["other", *lines[1::2]])
    before = (mine / "ä file").read_bytes()
    assert apply_patch.main(str(patch), str(mine)) == 1
    assert (mine / "ä file").read_bytes() == before


def test_what_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patch = ROOT / "cpp/patches/llama-cpp-hooks.patch"
    assert apply_patch.main(str(patch), str(tmp_path)) == 1
    first = patch.read_text(encoding="utf-8").split("--- a/")[1].splitlines()[0]
    assert f"{first}: there is no such file" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("cmake") is None or os.name == "nt", reason="cmake runs a shell script")
@pytest.mark.parametrize("is_published", [True, False])
def test_a_downloaded_source_has_the_published_hash(is_published: bool, tmp_path: Path) -> None:
    sdist = find_sdist() if is_published else tmp_path / "other.tar.gz"
    if not is_published:
        sdist.write_bytes(b"not it")
    pip = tmp_path / "python"
    pip.write_text(f'#!/bin/sh\nfor last; do :; done\nmkdir -p "$last" && cp "{sdist}" "$last/{find_sdist().name}"\n')
    pip.chmod(0o755)
    includes = "\n".join(f'include("{ROOT}/cmake/{name}.cmake")' for name in ("pin", "llama-source"))
    project = f'cmake_minimum_required(VERSION 3.21)\nproject(one NONE)\nset(Python_EXECUTABLE "{pip}")\n{includes}\n'
    (tmp_path / "CMakeLists.txt").write_text(project)
    env = {name: value for name, value in os.environ.items() if name != "PYPCD_LLAMA_CPP_SOURCE"}
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build"]
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
    assert (done.returncode == 0, "it is not the published one" in " ".join(done.stderr.split())) == (
        is_published,
        not is_published,
    ), done.stderr
    assert bool(list((tmp_path / "build" / "sdist").iterdir())) == is_published, "the next try downloads it again"
