"""A model's chat templates, which are programs of somebody else's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from llama_cpp import llama_chat_format

from pypcd.errors import PCDError

__all__ = ["KEY", "broken", "formatter", "refusing"]

KEY = "tokenizer.chat_template"  # in the metadata; a model may have others, as KEY.NAME


@functools.lru_cache(maxsize=8)  # compiling one takes as long as writing a long prompt with it
def formatter(template: str, *, bos: str = "", eos: str = "") -> Any:
    """What llama_cpp writes messages with.

    Raises:
        PCDError: Jinja cannot read the template.
    """
    try:
        return llama_chat_format.Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)
    except Exception as error:  # any: Jinja compiles it, and Python that
        why = str(error) or type(error).__name__
        raise PCDError(
            f"the model's chat template is broken: {why}; without a template the model works (pypcd generate, --no-chat, chat=False)"
        ) from error


def broken(metadata: Mapping[str, str]) -> dict[str, PCDError]:
    """The keys of those that Jinja cannot read, and why."""
    found = {}
    for key, template in metadata.items():
        if key == KEY or key.startswith(f"{KEY}."):
            try:
                formatter(template)
            except PCDError as error:
                found[key] = error
    return found


def refusing(error: PCDError) -> Callable[..., NoReturn]:
    """In the place of a broken template's handler."""

    def refuse(**_: Any) -> NoReturn:
        raise error

    return refuse
