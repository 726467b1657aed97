"""Answers that a grammar constrains: which are, and that they are plain unless their own call asks for PCD.

A JSON schema and a forced tool become a grammar on their way to llama_cpp.Llama.generate(), so that is where they are seen.
Constraints that are logits processors cannot be told from other processors. Knows nothing of settings and what they do.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp

from pypcd import engine

__all__ = ["LEFT_PLAIN", "has_grammar", "warn_once"]

LEFT_PLAIN = (
    "PCD is off in answers under a grammar, a JSON schema or a forced tool, where a contrast spoils values; pcd= in the call "
    "itself turns it on (docs/settings.md, Structured output)"
)

_PLACE = list(inspect.signature(llama_cpp.Llama.generate).parameters).index("grammar") - 1  # without self


def has_grammar(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether these arguments of llama_cpp.Llama.generate have a grammar."""
    return (args[_PLACE] if len(args) > _PLACE else kwargs.get("grammar")) is not None


def warn_once(n_before: int) -> None:
    """Log that an answer is left plain, the first time in a model."""
    if not n_before:
        engine.logger.warning("%s", LEFT_PLAIN)
