"""Makes `pypcd` known to lm-evaluation-harness as a model: `lm_eval --model pypcd`.

Versions after 0.4.13 find models of other packages by entry points (pyproject.toml has ours). Up to 0.4.13 the command
`lm_eval` knows its own models alone. So when it imports their list, ours is added, by name: nothing of it is imported before
it is asked for. Importing pypcd imports this; for the command a .pth file does, in that process only (cmake/pypcd-lm-eval.pth).
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["install"]

NAME, HOME = "pypcd", "pypcd.evaluation._harness:HarnessModel"
_LIST = "lm_eval.models"


def _register() -> None:
    from lm_eval.api.registry import model_registry  # type: ignore[import-not-found]

    if NAME not in model_registry:
        model_registry.register(NAME, target=HOME)


class _Finder:
    """Finds lm_eval.models where the other finders do, and has ours registered behind its own models."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _LIST:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(name, path, target) if find_spec and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()


_finder = _Finder()


def install() -> None:
    if _LIST in sys.modules:
        _register()
    elif _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
