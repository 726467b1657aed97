"""A model's chat templates, which are programs of somebody else's."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from llama_cpp import llama_chat_format

from pypcd.errors import PCDError

__all__ = ["KEY", "formatter", "readable"]

KEY = "tokenizer.chat_template"  # in the metadata; a model may have others, as KEY.NAME
_BEFORE, _BEHIND = "{{ raise_exception(", ") }}"  # in a template that says what is wrong with another, in JSON
_BROKEN = "the model's chat template is broken: "


@functools.lru_cache(maxsize=8)  # compiling one takes as long as writing a long prompt with it
def formatter(template: str, *, bos: str = "", eos: str = "") -> Any:
    """What llama_cpp writes messages with.

    Raises:
        PCDError: readable() has put the template in the place of a broken one.
    """
    if template.startswith(f'{_BEFORE}"{_BROKEN}'):
        raise PCDError(json.loads(template.removeprefix(_BEFORE).removesuffix(_BEHIND)))
    return llama_chat_format.Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos)


def readable(metadata: Mapping[str, str]) -> dict[str, str]:
    """A model's metadata, with a template that says what is wrong in place of each that Jinja cannot read.

    llama_cpp.Llama compiles all of them, and would not open the model.
    """
    found = dict(metadata)
    for key, template in metadata.items():
        if key == KEY or key.startswith(f"{KEY}."):
            try:
                formatter(template)
            except Exception as error:  # noqa: BLE001  any: Jinja compiles it, and Python that
                why = f"{_BROKEN}{str(error) or type(error).__name__}"
                text = f"{why}; without a template the model works (pypcd generate, --no-chat, chat=False)"
                found[key] = _BEFORE + json.dumps(text) + _BEHIND
    return found
