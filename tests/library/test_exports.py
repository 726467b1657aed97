"""What `import pypcd` offers."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import pypcd

# what stands for several types; Python gives such a thing neither a module nor a docstring, nor is a pickled one the same object
ALIASES = {"PCDSetting"}


def test_what_is_public_has_a_docstring_and_can_be_pickled_by_name() -> None:
    names: dict[str, object] = {}
    exec("from pypcd import *", names)  # noqa: S102
    assert sorted(set(names) - {"__builtins__"}) == sorted(pypcd.__all__)
    assert dir(pypcd) == sorted([*pypcd.__all__, "__version__"])
    assert pypcd.PCDConfig in typing.get_args(pypcd.PCDSetting)
    for name in {*pypcd.__all__} - ALIASES:
        thing = getattr(pypcd, name)
        assert thing.__module__.startswith("pypcd") and pickle.loads(pickle.dumps(thing)) is thing
        assert thing.__doc__ and (not inspect.isclass(thing) or thing.__doc__ != thing.__mro__[1].__doc__), name


def test_packages_that_docs_name_are_there_after_import_pypcd() -> None:
    said = "import pypcd; print(pypcd.ask.stream.__name__, pypcd.decode.parse('replay+pcd:paper:beta=1.5').name)"
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=False)
    assert done.stdout == "stream replay+pcd:paper:beta=1.5\n", done.stderr


MODULES = [
    m.name
    for m in pkgutil.walk_packages(pypcd.__path__, "pypcd.")
    if not m.name.endswith(("__main__", "_amx_probe", ".harness"))
]
CLASSES = [
    getattr(module, name) for module in map(importlib.import_module, MODULES) for name in getattr(module, "__all__", ())
]
CLASSES = list(dict.fromkeys(thing for thing in CLASSES if inspect.isclass(thing)))
CLASSES = [thing for thing in CLASSES if inspect.isclass(thing) and "\nAttributes:\n" in (inspect.getdoc(thing) or "")]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_every_attribute_that_a_docstring_names_is_there(cls: type) -> None:
    section = inspect.getdoc(cls).partition("\nAttributes:\n")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    named = [name for entry in re.findall(r"^    (\S.*?): ", section, re.MULTILINE) for name in entry.split(", ")]
    known = {name for base in cls.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", {}))}
    source = inspect.getsource(cls)
    assert named and all(name in known or f"self.{name}" in source for name in named), named


def test_errors_are_caught_by_their_ordinary_types() -> None:
    assert issubclass(pypcd.LibraryError, ImportError) and issubclass(pypcd.ModelError, ValueError)
    assert all(issubclass(e, pypcd.PCDError) for e in (pypcd.LibraryError, pypcd.ModelError, pypcd.UnsupportedError))


@pytest.mark.parametrize(
    ("of", "old", "new"),
    [
        (pypcd, "contrast", "pypcd.settings.formula.contrast"),
        (pypcd, "methods", "pypcd.decode"),
        (pypcd.Llama, "pcd_for", "Llama.pcd"),
        (pypcd.Llama, "set_sequence_pcd", "Llama.pcd"),
        (pypcd.Llama, "pcd_refusal", "Llama.check_pcd"),
        (pypcd.PCDConfig, "windowed", "PCDConfig.preset('window')"),
        (pypcd.PCDConfig, "from_profile", "PCDConfig.resolve(path)"),
        (pypcd.PCDLogits, "over_rotated", "PCDLogits.local"),
        (pypcd.PCDStats, "n_streams", "PCDStats.n_separate"),
    ],
)
def test_a_former_name_says_the_present_one(of: object, old: str, new: str) -> None:
    assert not hasattr(of, old)
    with pytest.raises(AttributeError, match=f"is now {re.escape(new)}"):
        getattr(of, old)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="it is now pypcd.PCDSetting"):
        pypcd.PCDFields  # noqa: B018
    assert not hasattr(pypcd, "Lama")
    with pytest.raises(AttributeError, match="module 'pypcd' has no attribute 'Lama'"):
        pypcd.Lama  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Lama' from 'pypcd'"):
        from pypcd import Lama  # noqa: F401


def test_type_checkers_and_users_get_the_same_names() -> None:
    tree = ast.parse(Path(pypcd.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    packages = {name for name, module in seen.items() if module == "pypcd"}
    assert packages == {*pypcd._PACKAGES} and sorted({*seen} - packages) == sorted(pypcd.__all__)
    for name, module in seen.items():
        assert getattr(pypcd, name) is getattr(importlib.import_module(module or ""), name)
