"""What `import pypcd` offers."""

from __future__ import annotations

import inspect

import pypcd


def test_all_is_sorted_and_importable() -> None:
    assert pypcd.__all__ == sorted(pypcd.__all__)
    assert all(getattr(pypcd, name).__module__.startswith("pypcd") for name in pypcd.__all__)


def test_every_public_name_has_a_docstring_of_its_own() -> None:
    for name in pypcd.__all__:
        thing = getattr(pypcd, name)
        assert thing.__doc__ and (not inspect.isclass(thing) or thing.__doc__ != thing.__mro__[1].__doc__), name


def test_a_star_import_gives_what_all_lists() -> None:
    names: dict[str, object] = {}
    exec("from pypcd import *", names)  # noqa: S102
    assert sorted(set(names) - {"__builtins__"}) == pypcd.__all__


def test_errors_are_caught_by_their_ordinary_types() -> None:
    assert issubclass(pypcd.LibraryError, ImportError) and issubclass(pypcd.ModelError, ValueError)
    assert all(issubclass(e, pypcd.PCDError) for e in (pypcd.LibraryError, pypcd.ModelError, pypcd.UnsupportedError))
