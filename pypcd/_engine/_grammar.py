"""A grammar beside an answer that is chosen outside llama.cpp's samplers: which tokens it allows next."""

from __future__ import annotations

import ctypes
import weakref

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd._engine import _log
from pypcd._engine._calls import vocabulary

__all__ = ["Grammar"]

_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Grammar:
    """A grammar, followed token by token from the beginning of an answer.

    Args:
        text: in llama.cpp's GBNF; its rule `root` is the whole answer.

    Raises:
        ValueError: llama.cpp cannot read it.
    """

    def __init__(self, llm: llama_cpp.Llama, text: str) -> None:
        _log.clear_errors()
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary(llm), text.encode(), b"root")
        if not sampler:
            raise ValueError(f"the grammar cannot be read: {_log.reason()}")
        self._sampler = sampler
        self._tokens = (llama_cpp.llama_token_data * llm.n_vocab())()
        weakref.finalize(self, llama_cpp.llama_sampler_free, sampler)

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
