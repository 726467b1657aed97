"""An import hook on sys.meta_path: a llama_cpp imported after pypcd loads pypcd's libllama.

Importing pypcd imports this, and nothing that takes time. `_library` loads and checks the library; the hook imports it
when llama_cpp is imported.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["install"]


class _Finder:
    """Finds llama_cpp where the other finders do, and wraps their loader in ours.

    Looking for it (importlib.util.find_spec) loads nothing. The finder stays installed: a second import of llama_cpp
    must get pypcd's library too, and removing an entry of sys.meta_path could make an import in another thread skip
    the next one.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "llama_cpp":
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec and finder is not self else None
            if spec is not None:
                if spec.loader is not None:  # None: a folder of that name without any code
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Wraps a loader so that the module it executes loads pypcd's library."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # from here on it is a module like any other
        from pypcd import _install, _library

        _install.read_environment()
        _library.load(module, lambda: self._loader.exec_module(module))
        import pypcd._engine  # noqa: F401  llama.cpp's log goes through it, from the first line on

        _install.apply()


_finder = _Finder()


def install() -> None:
    """
    Raises:
        LibraryError: llama_cpp is imported already, with a library that is not pypcd's.
    """
    if sys.modules.get("llama_cpp") is not None:
        from pypcd import _install, _library

        _install.read_environment()
        _library.check()
        _install.apply()
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
