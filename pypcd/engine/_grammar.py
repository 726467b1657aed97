"""Whether llama.cpp can read a grammar."""

from __future__ import annotations

import llama_cpp

from pypcd.engine import _log
from pypcd.engine._calls import vocabulary
from pypcd.errors import ArgumentError, InputError

__all__ = ["check_grammar"]


def check_grammar(llm: llama_cpp.Llama, grammar: llama_cpp.LlamaGrammar) -> None:
    """
    Raises:
        TypeError: it is no LlamaGrammar.
        ValueError: llama.cpp cannot read it; llama_cpp would end the process.
    """
    if not isinstance(grammar, llama_cpp.LlamaGrammar):
        raise ArgumentError(
            f"grammar is a {type(grammar).__name__}; allowed: LlamaGrammar.from_string(text) and the like"
        )
    _log.clear_errors()
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary(llm), grammar._grammar.encode(), grammar._root.encode())
    if not sampler:
        raise InputError(f"the grammar is not valid: {_log.reason()}; it needs a rule for {grammar._root!r}")
    llama_cpp.llama_sampler_free(sampler)
