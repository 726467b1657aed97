"""PCD in a context: which of two engines does it, and what it can be asked.

"native" is pypcd's own libllama (_native.py, where each function is described), "stock" any other one (_stock.py). The twin of a token
is the same token evaluated a second time, in a sequence of its own; its logits are L*.
"""

from __future__ import annotations

import llama_cpp

from pypcd import library
from pypcd.engine._bindings import is_native, only_native
from pypcd.engine._calls import context, model, stock
from pypcd.engine._model import is_recurrent, slides
from pypcd.engine._native import Native, needs
from pypcd.engine._rotation import watch_of
from pypcd.engine._stock import Stock, n_twins, sees_operations
from pypcd.engine._stock import needs as needs_native
from pypcd.errors import LibraryError, UnsupportedError
from pypcd.settings.config import PCDConfig
from pypcd.settings.ranges import Choice, OrNone

__all__ = ["N_SEQUENCES", "choose_engine", "n_twins", "open_stock", "pcd", "pcd_refusal", "sees_operations"]

N_SEQUENCES = min(192, int(llama_cpp.llama_max_parallel_sequences()))  # sequences for callers; higher ids are for twins
_ENGINE = OrNone(Choice(("native", "stock")))


def pcd(llm: llama_cpp.Llama) -> Native | Stock:
    """The engine that does PCD for a model; both have the same functions.

    Raises:
        PCDError: the model is closed.
    """
    return engine if (engine := stock(llm)) is not None else Native(llm)


def pcd_refusal(llm: llama_cpp.Llama, config: PCDConfig | None) -> str | None:
    """As Native.refusal(); PCD off can always run."""
    return None if config is None else pcd(llm).refusal(config)


def choose_engine(name: str | None, *settings: PCDConfig | None) -> str:
    """The engine for a model: "native" or "stock".

    Args:
        name: None takes the native one if the library of this process is pypcd's and the settings need no other.

    Raises:
        ValueError: there is no such engine.
        LibraryError: the native one is asked for, and the library is another.
        UnsupportedError: some of the settings need the one engine, and some the other.
    """
    name = _ENGINE("engine", name)
    if name is None:
        stock, native = ([what for one in settings if one and (what := of(one))] for of in (needs, needs_native))
        if stock and native:
            raise UnsupportedError(
                f"{stock[0]} needs the stock engine and {native[0]} the native one; ask for them one by one"
            )
        return "stock" if library.why_stock() or stock else "native"
    if name == "native" and not is_native():
        raise LibraryError(only_native('engine="native"'))
    return name


def open_stock(llm: llama_cpp.Llama, n_seq_max: int) -> Stock:
    """The engine "stock" for a model that has just been opened.

    Args:
        n_seq_max: the sequences of the caller; the others are for twins.
    """
    params, closing = llm.context_params, llm._model._exit_stack
    return Stock(llm._ctx, model(llm), n_seq_max, _refusal(llm, n_seq_max), watch_of(llm), params, closing)


def _refusal(llm: llama_cpp.Llama, n_seq_max: int) -> str | None:
    """Why the engine "stock" can have no twins here, in a sentence."""
    params = llm.context_params
    if not llama_cpp.llama_get_memory(context(llm)):
        return "this model keeps no keys and values, so there is no context to contrast"
    if llm.metadata.get("general.architecture") == "cogvlm":
        return "llama.cpp answers with the rows of other tokens when some rows of a batch of this architecture are asked for"
    if is_recurrent(llm):
        return only_native("PCD beside recurrent layers, whose state has no cells to share,")
    if slides(llm) and not params.swa_full:
        return "sliding-window layers forget what twins see; open the model with swa_full=True"
    if params.embeddings:
        return "the model is opened for embeddings, which have nothing to contrast"
    n = int(llama_cpp.llama_n_seq_max(context(llm)))
    if n <= n_seq_max:
        return f"n_seq_max is {n_seq_max} and leaves no sequence for a twin; allowed with PCD here: less than n_batch, {llm.n_batch}"
    return None
