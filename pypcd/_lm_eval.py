"""Makes `pypcd` known to lm-evaluation-harness as a model: `lm_eval --model pypcd`.

Versions after 0.4.13 find models of other packages by entry points (pyproject.toml has ours). Up to 0.4.13 the command
`lm_eval` knows its own models alone. So when it imports their list, `_finder` has ours added, by name: nothing of it is
imported before it is asked for. For the command, a line of cmake/pypcd.pth imports pypcd, in that process only.
"""

from __future__ import annotations

__all__ = ["HOME", "NAME", "register"]

NAME, HOME = "pypcd", "pypcd.evaluation._harness:HarnessModel"


def register() -> None:
    """Add pypcd to the models of lm_eval, which has been imported."""
    from lm_eval.api.registry import model_registry  # type: ignore[import-not-found]

    if NAME not in model_registry:
        model_registry.register(NAME, target=HOME)
