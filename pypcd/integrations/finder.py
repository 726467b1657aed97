"""An import hook on sys.meta_path: a llama_cpp imported after pypcd loads pypcd's libllama.

Importing pypcd imports this, and nothing that takes time. `library` loads and checks the library, and `install` decides
what llama_cpp.Llama is; the hook imports them when llama_cpp is imported. If it has been imported before, they do their work
at once, as far as they can.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["install"]


class _Finder:
    """Finds llama_cpp where the other finders do, and has its loader call one of the functions below.

    Looking for it (importlib.util.find_spec) loads nothing. The finder stays installed: a second import of llama_cpp
    must get pypcd's library too, and removing an entry of sys.meta_path could make an import in another thread skip
    the next one.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _EXECUTE:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec and finder is not self else None
            if spec is not None:
                if spec.loader is not None:  # None: a folder of that name without any code
                    spec.loader.exec_module = functools.partial(_run, spec.loader)
                return spec
        return None


def _run(loader: Any, module: Any) -> None:
    del loader.exec_module  # from here on it is a loader like any other
    _EXECUTE[module.__name__](module, lambda: loader.exec_module(module))


def _execute_llama_cpp(module: Any, execute: Callable[[], None]) -> None:
    from pypcd import library

    _take_over(lambda: library.load(module, execute))


def _take_over(get_library: Callable[[], object]) -> None:
    from pypcd.integrations.install import apply, read_environment

    read_environment()
    get_library()
    import pypcd.engine  # noqa: F401  llama.cpp's log goes through it, from the first line on

    apply()


def _execute_types_of_server(module: Any, execute: Callable[[], None]) -> None:
    """llama_cpp.server, the server written in Python, refuses "pcd" in a request while install() is in force: it has one setting, install()'s,
    for all requests, and would pass over the field without a word."""
    from pypcd.integrations.install import is_installed

    execute()
    if not is_installed():
        return
    from fastapi import HTTPException  # type: ignore[import-not-found,unused-ignore]
    from pydantic import create_model, model_validator  # type: ignore[import-not-found,unused-ignore]

    def refuse(request: Any) -> Any:
        if isinstance(request, dict) and "pcd" in request:
            raise HTTPException(
                400,
                'this server takes no "pcd" in a request; start it with a setting for all of them, such as PYPCD=unsure, or use pypcd serve',
            )
        return request

    for name in ("CreateCompletionRequest", "CreateChatCompletionRequest"):
        check: dict[str, Any] = {"refuse": model_validator(mode="before")(refuse)}
        base = getattr(module, name)
        setattr(module, name, create_model(name, __base__=base, __module__=base.__module__, __validators__=check))


_EXECUTE = {"llama_cpp": _execute_llama_cpp, "llama_cpp.server.types": _execute_types_of_server}

_finder = _Finder()


def install() -> None:
    """
    Raises:
        LibraryError: llama_cpp is imported already, with another library than pypcd's, which is installed and fits.
    """
    if sys.modules.get("llama_cpp") is not None:
        from pypcd import library

        _take_over(library.check)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
