"""A libllama is loaded only with the llama-cpp-python and the ggml that it was built for. One process per refusal."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import llama_cpp
import pytest
from conftest import run_python

from pypcd import library
from pypcd.library import ggml

PACKAGE = Path(llama_cpp.__file__).parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="names of files and how they are loaded are Linux's")


# --- which ggml there is ---


@linux
def test_the_version_is_that_of_the_files_name() -> None:
    (file,) = (PACKAGE / "lib").glob("libggml-base.so.*.*.*")
    assert ggml.identity(PACKAGE / "lib")["version"] == file.name.partition(".so.")[2]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("0123456789abcdef", "0123456", True),  # shortened
        ("0123456-dirty", "0123456789", True),  # marked
        ("0123456", "unknown", True),
        ("0123456", "1123456", False),
        ("0123456-dirty", "0123457-dirty", False),
    ],
)
def test_two_commits_that_are_known_have_to_be_one(a: str, b: str, same: bool) -> None:
    for here, there in ((a, b), (b, a)):
        found = ggml.difference(*({"version": "0.25.3", "commit": commit} for commit in (here, there)))
        assert found == ("" if same else f"its commit is {here}; allowed: {there}")


# --- refusals, before libllama is loaded ---


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The installed llama_cpp once more, its files linked, found before the installed one."""
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    for path in PACKAGE.iterdir():
        if path.is_file():
            shutil.copy(path, package)
    for path in (PACKAGE / "lib").iterdir():
        (package / "lib" / path.name).symlink_to(path)
    return package


def replace(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert len(old) == len(new) and old in data
    path.unlink()
    path.write_bytes(data.replace(old, new))


ASK = """if True:
    import sys
    sys.path.insert(0, sys.argv[1])
    import pypcd
    try:
        pypcd.Llama
    except ImportError as error:
        assert isinstance(error, pypcd.LibraryError), error
        print(error)
    import os
    maps = "/proc/self/maps"
    print("libllama is loaded:", os.path.exists(maps) and "libllama" in open(maps).read())"""


def refusal(copy: Path) -> str:
    done = run_python(ASK, str(copy.parent))
    assert done.returncode == 0, done.stderr
    *said, loaded = done.stdout.splitlines()
    assert loaded == "libllama is loaded: False"
    return "\n".join(said)


@linux
def test_a_copy_that_is_damaged_or_another_version_is_refused(copy: Path) -> None:
    assert run_python(ASK, str(copy.parent)).stdout == "libllama is loaded: True\n", "the copy by itself loads"
    base, init, pin = copy / "lib/libggml-base.so", copy / "__init__.py", llama_cpp.__version__
    other = copy / "lib/libggml-other.so"
    other.write_text("a driver is missing")
    assert re.match("a backend of .* cannot be loaded: .*libggml-other.so: .*; install", refusal(copy))
    other.unlink()
    replace(base, b"\0ggml_backend_sched_new\0", b"\0ggml_backend_sched_old\0")
    assert re.match("libllama cannot be loaded: .*: ggml_backend_sched_new; reinstall pypcd", refusal(copy))
    again = f"; run: pip install --force-reinstall --no-deps llama-cpp-python=={pin}"
    base.write_text("cut off")
    assert re.match("the ggml of .* cannot be used: ", said := refusal(copy)) and again in said
    base.unlink()
    assert re.match("the ggml of .* cannot be used: .*No such file", said := refusal(copy)) and again in said
    replace(init, pin.encode(), b"9.9.99"[: len(pin)])
    assert f"{pin}, but 9.9" in (said := refusal(copy)) and said.endswith(f"; run: pip install llama-cpp-python=={pin}")


@linux
@pytest.mark.parametrize("key", ["version", "commit"])
def test_another_ggml_is_refused(key: str, copy: Path) -> None:
    own = ggml.identity(PACKAGE / "lib")[key]
    if own == "unknown":
        pytest.skip("this ggml does not know its commit")
    other = {"version": "9" + own[1:], "commit": f"{int(own[0], 16) ^ 1:x}" + own[1:]}[key]
    replace(copy / "lib/libggml-base.so", own.encode() + b"\0", other.encode() + b"\0")
    said = refusal(copy)
    assert (
        f"({copy / 'lib'}) is not the one that pypcd's libllama was built for: its {key} is {other}; allowed: {own};"
        in said
    )
    assert f"run: pip install --force-reinstall --no-deps llama-cpp-python=={llama_cpp.__version__} (or" in said


@linux
def test_a_library_that_does_not_say_what_it_was_built_for_is_refused(tmp_path: Path) -> None:
    project = tmp_path / "pypcd"
    shutil.copytree(
        Path(library.__file__).parents[1], project, ignore=shutil.ignore_patterns("lib", "bin", "__pycache__")
    )
    lib = next(folder for folder in library.library_dirs() if (folder / "ggml.json").exists())
    (project / "lib").mkdir()
    shutil.copy(lib / "libllama.so", project / "lib")
    done = run_python("import sys; sys.path.insert(0, sys.argv[1]); import pypcd; pypcd.Llama", str(tmp_path))
    assert re.search(
        r"LibraryError: .*ggml\.json, which says what ggml libllama was built for, is missing; reinstall pypcd",
        done.stderr.splitlines()[-1],
    )
