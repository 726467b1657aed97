"""PCD in a context: which of two engines does it, and what it can be asked.

"native" is pypcd's own libllama (_native.py), "stock" any other one (_stock.py). The twin of a token is the same token evaluated a
second time, in a sequence of its own; its logits are L*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import llama_cpp

from pypcd import library
from pypcd.engine._bindings import is_native, only_native
from pypcd.engine._calls import context, model, stock
from pypcd.engine._model import is_recurrent, slides
from pypcd.engine._native import Native
from pypcd.engine._results import PCDLogits, PCDStats
from pypcd.engine._stock import Stock, n_twins
from pypcd.errors import LibraryError
from pypcd.settings.config import PCDConfig
from pypcd.settings.ranges import Choice, OrNone

__all__ = ["N_SEQUENCES", "choose_engine", "n_twins", "open_stock", "pcd", "pcd_refusal"]

N_SEQUENCES = min(192, int(llama_cpp.llama_max_parallel_sequences()))  # sequences for callers; higher ids are for twins
_ENGINE = OrNone(Choice(("native", "stock")))


class Engine(Protocol):
    """What a model's engine can be asked. A closed model raises PCDError."""

    def set(self, config: PCDConfig | None, combine: bool = True) -> str | None:
        """Put a setting in force, or (None) turn PCD off.

        Args:
            combine: False leaves the contrast to a sampler.

        Returns:
            None; or why PCD stays off, if an environment variable turns it off.

        Raises:
            ValueError: a value is out of range.
            UnsupportedError: this model or context cannot run it, or there is no memory for it; the previous setting stays.
        """

    def trim(self) -> None:
        """Free the second keys and values that the setting in force does not need: all of them while PCD is off."""

    def refusal(self, config: PCDConfig) -> str | None:
        """Why this model or context cannot run a setting, in a sentence; None if it can. Nothing changes; memory is not asked for."""

    def in_force(self, known: Sequence[PCDConfig | None]) -> tuple[PCDConfig | None, bool]:
        """The setting in force, None while PCD is off, and whether rows are contrasted (or left to a sampler).

        Args:
            known: settings that it may be; the one that it is is returned itself.
        """

    def suspended(self) -> contextlib.AbstractContextManager[None]:
        """A block without twins, for the parts of a prompt whose logits are not read."""

    def set_sequence(self, seq_id: int, config: PCDConfig | None) -> None:
        """Give one sequence a setting of its own, or (None) no twins for its tokens. See cpp/llama-pcd.h for the rules.

        Raises:
            ValueError: the setting has a value that only the context can change.
            UnsupportedError: the sequence has a backend sampler, or the engine is "stock".
        """

    def unset_sequence(self, seq_id: int) -> None:
        """Let a sequence follow its context's setting again."""

    def begin_answer(self, pos: int, seq_id: int = 0) -> None:
        """An answer begins at this position, where the rows of a prompt are asked for too (min_first_entropy)."""

    def set_tokens(self, tokens: Sequence[int], seq_id: int = 0) -> None:
        """The tokens of a sequence that was restored: a saved state does not have them, nor where an answer began."""

    def logits(self, i: int) -> PCDLogits:
        """The logits of entry i of the last batch, before and after the contrast, copied.

        Raises:
            PCDError: the last evaluation was without PCD, or there was none.
        """

    def best(self, i: int) -> tuple[int, int] | None:
        """The most probable tokens of entry i before and after the contrast, without a copy of the rows; None if nothing was contrasted."""

    def has_twin(self, i: int) -> bool:
        """Whether entry i was evaluated a second time; not if that could not change the result."""

    def stats(self) -> PCDStats:
        """What PCD has done in this context so far."""

    def init_sampler(self, row: int) -> Any:
        """A llama_sampler that contrasts the candidates of a row; a chain that it is added to owns it.

        Raises:
            UnsupportedError: the engine is "stock".
        """


def pcd(llm: llama_cpp.Llama) -> Engine:
    """The engine that does PCD for a model.

    Raises:
        PCDError: the model is closed.
    """
    return stock(llm) or Native(llm)


def pcd_refusal(llm: llama_cpp.Llama, config: PCDConfig | None) -> str | None:
    """As Engine.refusal(); PCD off can always run."""
    return None if config is None else pcd(llm).refusal(config)


def choose_engine(name: str | None) -> str:
    """The engine for a model: "native" or "stock".

    Args:
        name: None takes the native one if the library of this process is pypcd's.

    Raises:
        ValueError: there is no such engine.
        LibraryError: the native one is asked for, and the library is another.
    """
    name = _ENGINE("engine", name)
    if name is None:
        return "stock" if library.why_stock() else "native"
    if name == "native" and not is_native():
        raise LibraryError(only_native('engine="native"'))
    return name


def open_stock(llm: llama_cpp.Llama, n_seq_max: int) -> Stock:
    """The engine "stock" for a model that has just been opened.

    Args:
        n_seq_max: the sequences of the caller; the others are for twins.
    """
    return Stock(context(llm), model(llm), n_seq_max, _refusal(llm, n_seq_max))


def _refusal(llm: llama_cpp.Llama, n_seq_max: int) -> str | None:
    """Why the engine "stock" can have no twins here, in a sentence."""
    params = llm.context_params
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
