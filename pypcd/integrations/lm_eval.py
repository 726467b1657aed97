"""The command of lm-evaluation-harness with pypcd among its models: `python -m pypcd.integrations.lm_eval --model pypcd …`.

Versions after 0.4.13 find models of other packages by entry points (pyproject.toml has ours), so there `lm_eval` does too. Up to
0.4.13 that command knows its own models alone, and register() adds ours by name.
"""

from __future__ import annotations

from pypcd.errors import UnsupportedError

__all__ = ["HOME", "NAME", "main", "register"]

NAME, HOME = "pypcd", "pypcd.integrations.harness:HarnessModel"


def register() -> None:
    """Add pypcd to the models of lm_eval."""
    from lm_eval.api.registry import model_registry  # type: ignore[import-not-found, import-untyped, unused-ignore]

    if NAME not in model_registry:
        model_registry.register(NAME, target=HOME)


def main() -> None:
    """What the command `lm_eval` does, with the arguments of this process.

    Raises:
        UnsupportedError: lm_eval is not installed.
    """
    try:
        from lm_eval.__main__ import cli_evaluate  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ModuleNotFoundError as error:
        if error.name != "lm_eval":
            raise
        raise UnsupportedError(
            "lm_eval is not installed; pip install 'lm_eval>=0.4.10', with Python 3.10 or newer"
        ) from None
    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
