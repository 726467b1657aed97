"""The libraries of the server's page are those that their authors released, with their licences."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from base64 import b64encode
from hashlib import sha512
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "cpp" / "server" / "page"
VENDOR = PAGE / "assets" / "vendor"
VERSIONS = json.loads((VENDOR / "versions.json").read_text(encoding="utf-8"))


def test_each_file_has_a_release_and_each_library_its_licence() -> None:
    here = {path.relative_to(VENDOR).as_posix() for path in VENDOR.rglob("*") if path.is_file()}
    named = {f"{name}/{file}" for name, library in VERSIONS.items() for file in library["files"]}
    assert here - {"versions.json"} == named
    assert {f"{name}/LICENSE" for name in VERSIONS} <= named
    installed = (ROOT / "cmake" / "server.cmake").read_text(encoding="utf-8")
    assert re.search(rf"IN ITEMS {' '.join(VERSIONS)}\)", installed), "licences are installed with the executable"


def test_they_are_as_released(tmp_path: Path) -> None:
    """versions.json has the release of each library, its integrity as npm states it, and which of its files are here under which name."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not there to fetch the releases")
    for name, library in VERSIONS.items():
        options = ["--prefer-offline", "--fetch-retries=1", "--fetch-timeout=30000", "--loglevel=error"]
        release = f"{library.get('package', name)}@{library['version']}"
        command = ["npm", "pack", release, *options, f"--pack-destination={tmp_path}"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if re.search(r"code (ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|ETIMEDOUT)", run.stderr):
            pytest.skip("the releases cannot be fetched without a network")
        assert run.returncode == 0, run.stderr
        archive = tmp_path / run.stdout.split()[-1]
        assert library["integrity"] == "sha512-" + b64encode(sha512(archive.read_bytes()).digest()).decode()
        with tarfile.open(archive) as members:
            for here, there in library["files"].items():
                released = next(member for member in members if member.name.partition("/")[2] == there)
                file = members.extractfile(released)
                assert file and (VENDOR / name / here).read_bytes() == file.read(), f"{name}/{here}"
