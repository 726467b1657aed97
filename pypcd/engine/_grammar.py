"""Grammars: whether llama.cpp can read one, and which tokens it allows next where an answer is chosen outside its samplers."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _log
from pypcd.engine._calls import vocabulary
from pypcd.errors import ArgumentError, InputError

__all__ = ["Grammar", "check_grammar"]

_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


def _sampler(llm: llama_cpp.Llama, text: str, root: str = "root") -> Any:
    """
    Raises:
        ValueError: llama.cpp cannot read it; llama_cpp would end the process.
    """
    _log.clear_errors()
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary(llm), text.encode(), root.encode())
    if not sampler:
        raise InputError(f"the grammar is not valid: {_log.reason()}; it needs a rule for {root!r}")
    return sampler


def check_grammar(llm: llama_cpp.Llama, grammar: llama_cpp.LlamaGrammar) -> None:
    """
    Raises:
        TypeError: it is no LlamaGrammar.
        ValueError: llama.cpp cannot read it.
    """
    if not isinstance(grammar, llama_cpp.LlamaGrammar):
        raise ArgumentError(
            f"grammar is a {type(grammar).__name__}; allowed: LlamaGrammar.from_string(text) and the like"
        )
    llama_cpp.llama_sampler_free(_sampler(llm, grammar._grammar, grammar._root))


class Grammar:
    """A grammar, followed token by token from the beginning of an answer.

    Args:
        text: in llama.cpp's GBNF; its rule `root` is the whole answer.

    Raises:
        ValueError: llama.cpp cannot read it.
    """

    def __init__(self, llm: llama_cpp.Llama, text: str) -> None:
        self._sampler = _sampler(llm, text)
        self._tokens = (llama_cpp.llama_token_data * llm.n_vocab())()
        weakref.finalize(self, llama_cpp.llama_sampler_free, self._sampler)

    def masked(self, row: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
        """A copy of a row with -inf for tokens that may not come next."""
        tokens = np.frombuffer(memoryview(self._tokens).cast("B"), _DATA)
        tokens["id"], tokens["logit"], tokens["p"] = np.arange(len(row)), 0.0, 0.0
        array = llama_cpp.llama_token_data_array(data=self._tokens, size=len(row), selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        result = row.copy()
        result[tokens["id"][np.isneginf(tokens["logit"])]] = -np.inf
        return result

    def accept(self, token: int) -> None:
        """Write down the next token, one that is allowed."""
        llama_cpp.llama_sampler_accept(self._sampler, token)
