"""A model's chat templates, which are programs of somebody else's."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from llama_cpp import llama_chat_format

__all__ = ["KEY", "formatter", "readable"]

KEY = "tokenizer.chat_template"  # in the metadata; a model may have others, as KEY.NAME


@functools.lru_cache(maxsize=8)  # compiling one takes as long as writing a long prompt with it
def formatter(template: str, *, bos: str = "", eos: str = "") -> Any:
    """What llama_cpp writes messages with."""
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
                why = f"the model's chat template is broken: {str(error) or type(error).__name__}"
                remedy = "without a template the model works (pypcd generate, --no-chat, chat=False)"
                found[key] = "{{ raise_exception(" + json.dumps(f"{why}; {remedy}") + ") }}"
    return found
