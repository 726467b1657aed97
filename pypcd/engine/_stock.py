"""PCD on any libllama: twins made of functions that llama.cpp itself has, and the contrast in numpy.

In a KV cache that all sequences share (kv_unified), llama_memory_seq_cp gives cells to another sequence without a copy. So a
twin is its token in a sequence of its own, which has been given the first n_sink cells of the text and the last ones before
the token's position p, or without a window all of them:

    seq_cp(text, twin, 0, n_sink);  seq_cp(text, twin, p + 1 - window, p)
    decode(token, at p, in twin)    # L*; behind the text's own token ("alternate"), or in one batch with it ("fused")
    seq_rm(twin)                    # the memory is as it is without PCD

Nothing is left between two calls, so prefixes, saved states and rewinds are as they are in llama.cpp. An over-rotated twin is
decoded by itself, with other tables (_rotation.py), and with cache="rerotated" on keys of ours (_keys.py); with cache="separate" a
second context does that (_second.py). What this cannot do is in needs(), and what it cannot do in a context is told to Stock.

Batches that come through engine.decode() or a pypcd.Llama's methods pass through Stock.decode(). Those that others give to
llama_decode are noticed when the function returns (watch()).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from pypcd.engine import _log
from pypcd.engine._bindings import only_native
from pypcd.engine._calls import batch_of
from pypcd.engine._keys import SecondKeys
from pypcd.engine._results import PCDLogits, PCDStats
from pypcd.engine._rotation import Rotation, Watch, unknown_layout
from pypcd.engine._second import Second
from pypcd.engine._tensors import TYPES
from pypcd.errors import PCDError, UnsupportedError
from pypcd.settings import formula
from pypcd.settings.config import PCDConfig
from pypcd.settings.fields import FIELDS

__all__ = ["Stock", "n_twins", "needs", "sees_operations", "watch"]

_N_TWINS = 16  # at most, in one batch
_SECTIONS = 8, 40  # enum llama_rope_type: M-RoPE, and with interleaved sections
_NO_ROOM = "no free cells for twins beside their tokens: each twin before its token, in the same cell"
_NOT_FUSED = "over-rotated twins are evaluated by themselves in the stock engine"
_UNSEEN = (
    'cache="separate" evaluates the text a second time, and this one has parts that are no tokens, were moved, or were restored '
    "without them; use cache=shared, or evaluate the text from its beginning"
)
_PICTURES = (
    "this model rotates the keys of pictures by three positions, and this text has parts that are no tokens, or were restored "
    'without them; use cache=shared, or engine="native"'
)
# what gives a context another text; the last two are former names, which llama-cpp-python 0.3.16 calls
_RESTORE = "llama_state_set_data", "llama_state_load_file", "llama_set_state_data", "llama_load_session_file"
# what changes a sequence in a way that its tokens are not known from
_MOVE = (
    *("llama_state_seq_set_data", "llama_state_seq_set_data_ext", "llama_state_seq_load_file"),
    "llama_memory_seq_keep",
)
_SHIFT = "llama_memory_seq_add", "llama_memory_seq_div"  # the same, and their keys follow with the next token
# what a second context would not have
_ADAPT = (
    *("llama_set_adapter_lora", "llama_set_adapters_lora"),
    *("llama_set_adapter_cvec", "llama_apply_adapter_cvec"),
)
_ADAPTED = 'cache="separate" evaluates a second context, which does not have the LoRA or control vector of this one; use cache=shared'
_ADAPTED_PLAIN = (
    "this context has a LoRA or a control vector, and was opened for plain decoding, without the callback that this needs; open the model "
    "with the setting (pcd=), or give the LoRA as lora_path="
)
_COUNTED = "n_tokens n_twins n_skipped n_caught_up n_fused n_alternate n_sequential n_separate n_fallbacks"

Logits = npt.NDArray[np.float32]  # [n_vocab]


# by the addresses of contexts, and of their memories
_contexts: weakref.WeakValueDictionary[int, Stock] = weakref.WeakValueDictionary()
_adapted = set[int]()  # the addresses of contexts, which have LoRAs before they have twins


def _address(ctx: Any) -> int:
    return int(getattr(ctx, "value", ctx) or 0)


def _address_of(callback: Any) -> int:
    return ctypes.cast(callback, ctypes.c_void_p).value or 0


def watch() -> None:
    """Have twins evaluated for whoever calls llama_cpp.llama_decode, and rows forgotten when a state is restored."""

    def decoded(result: int, function: Any, args: Sequence[Any]) -> int:
        twins = _contexts.get(_address(args[0])) if result == 0 else None
        return result if twins is None else twins.decoded(args[1])

    def then(names: Sequence[str], do: Callable[..., None]) -> None:
        def called(result: Any, function: Any, args: Sequence[Any]) -> Any:
            if twins := _contexts.get(_address(args[0])):
                do(twins, *args[1:])
            return result

        for name in names:
            if function := getattr(llama_cpp, name, None):
                function.errcheck = called

    def adapted(result: int, function: Any, args: Sequence[Any]) -> int:
        if not result:  # it did not fail
            _adapted.add(_address(args[0]))
        return result

    def freed(result: Any, function: Any, args: Sequence[Any]) -> Any:
        """Another context may get this address, while something keeps this one's twins alive."""
        _adapted.discard(_address(args[0]))
        if twins := _contexts.pop(_address(args[0]), None):
            _contexts.pop(twins._registered[1], None)
        return result

    llama_cpp.llama_decode.errcheck, llama_cpp.llama_free.errcheck = decoded, freed
    then(_RESTORE, lambda twins, *_: twins.forget())
    then(_MOVE, lambda twins, *_: twins.forget_texts())
    then(_SHIFT, Stock.shifted)
    then(["llama_set_abort_callback"], lambda twins, *abort: setattr(twins, "abort", abort))
    then(["llama_memory_clear"], lambda twins, *_: twins.removed(-1, 0, -1))
    then(["llama_memory_seq_rm"], Stock.removed)
    then(["llama_memory_seq_cp"], Stock.copied)
    for name in _ADAPT:
        if function := getattr(llama_cpp, name, None):
            function.errcheck = adapted


def n_twins(n_seq_max: int, n_batch: int) -> int:
    """How many sequences to open a context with for twins, beside those of the caller; llama.cpp has at most n_batch, and 64 or 256."""
    most = min(n_batch, int(llama_cpp.llama_max_parallel_sequences()))
    return max(min(_N_TWINS, most - n_seq_max), 0)


def needs(config: PCDConfig) -> str | None:
    """What of a setting only pypcd's own libllama can do, in a few words; None if any libllama can do it all."""
    if _rotates(config, "rerotated") and config.type_k_over is not None:
        return 'type_k_over with cache="rerotated"'
    if config.sequences == "chosen":
        return 'sequences="chosen"'
    if config.window == 1 and config.n_sink:
        return "a window of 1 with n_sink above 0"  # llama.cpp wants a sequence's last position to be the one before
    return None


def _rotates(config: PCDConfig | None, cache: str | None = None) -> bool:
    """Whether a setting over-rotates, with this cache."""
    return config is not None and config.perturbation == "over-rotation" and cache in (None, config.cache)


def sees_operations(config: PCDConfig | None) -> bool:
    """Whether the context needs a callback for a setting."""
    return _rotates(config) and not _rotates(config, "separate")


def _seen(config: PCDConfig, pos: int) -> tuple[range, range]:
    """The positions before this one that its twin sees."""
    near = 0 if config.window is None else max(pos + 1 - config.window, 0)
    return range(min(config.n_sink, near)), range(near, pos)


def _table(config: PCDConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("alpha", "base_ratio", "transition")}


@dataclasses.dataclass
class _Answer:
    """Where an answer begins in a sequence: the position of the token with its first row, and that row's entropy in bits
    (None: it is not decoded yet)."""

    first: int
    entropy: float | None = None


@dataclasses.dataclass
class _Row:
    """The logits of a token.

    Attributes:
        standard: L.
        local: L*, if there was a twin.
        kept: the plausible tokens, once they are needed.
        contrasted: L~.
        shown: L~ as callers see it, where what is not plausible is far behind.
        beta: the strength of the contrast, if there was one.
    """

    standard: Logits
    local: Logits | None = None
    kept: npt.NDArray[np.intp] | None = None
    contrasted: Logits | None = None
    shown: Logits | None = None
    beta: float | None = None

    @functools.cached_property
    def entropy(self) -> float:
        return formula.entropy(self.standard)


@dataclasses.dataclass
class _Token:
    """A token of a batch.

    Attributes:
        index: in the caller's batch.
        asked: whether its row is.
        early: whether min_context, or its answer's first row, leaves it plain.
        first: the token with the first row of its answer, if that is in the same batch.
        row: once it is evaluated.
    """

    index: int
    token: int
    pos: int
    seqs: list[int]
    asked: bool
    early: bool = False
    first: _Token | None = None
    row: _Row | None = None

    @property
    def parent(self) -> int:
        """The sequence whose cells its twin sees."""
        return min(self.seqs)

    def known(self) -> _Row:
        assert self.row is not None
        return self.row


class Stock:
    """PCD in one context, by the functions of Native.

    Args:
        handle: what holds the llama_context, and can open it again (_handles.py).
        model: its llama_model.
        n_seq_max: the sequences of the caller; those above are for twins.
        refusal: why there can be no twin in this context, in a sentence; None if there can.
        watch: the callback that it is given once an operation has to be seen.
        params: its llama_context_params.
        closing: what is closed before the model is.
    """

    def __init__(
        self, handle: Any, model: Any, n_seq_max: int, refusal: str | None, watch: Watch, params: Any, closing: Any
    ) -> None:
        self._handle, self._model, self._refusal = handle, model, refusal
        self._watch, self._params, self._closing = watch, params, closing
        self._rotation = Rotation()
        self._second: Second | None = None
        self.abort: tuple[Any, Any] = llama_cpp.ggml_abort_callback(), None  # the context's, and what it is given
        self._texts: dict[int, list[int] | None] = {}  # the tokens of each sequence; None: not known
        self._keys = SecondKeys(handle, model)
        self._has_sections = llama_cpp.llama_model_rope_type(model) in _SECTIONS
        closing.callback(self._rotation.close)
        closing.callback(self._keys.close)
        ctx = handle.ctx
        self._twin_seqs = range(n_seq_max, int(llama_cpp.llama_n_seq_max(ctx)))
        self._n_vocab = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self._n_batch = int(llama_cpp.llama_n_batch(ctx))
        self._n_together = min(len(self._twin_seqs), int(llama_cpp.llama_n_ubatch(ctx)))  # twins, in one graph
        self._is_suspended = self._is_evaluating = False
        self._answers: dict[int, _Answer] = {}
        self._asked: list[_Token] = []  # those of the last batch, if PCD was on
        self._is_theirs = True  # llama.cpp has this batch's rows, under its indices
        self._counts = dict.fromkeys(_COUNTED.split(), 0)
        self._last_fallback = ""
        self._config: PCDConfig | None = None
        self._is_moved = False  # by llama_memory_seq_add or _div: keys follow with the next token
        self._adopt()

    @property
    def _ctx(self) -> Any:
        return self._handle.ctx

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(self._ctx)

    def _adopt(self) -> None:
        """Take on the context that the handle holds now."""
        self._registered = _address(self._ctx), _address(self._memory)
        for address in self._registered:
            _contexts[address] = self
        llama_cpp.llama_set_abort_callback(self._ctx, *self.abort)
        self._asked = []

    @property
    def shows_operations(self) -> bool:
        """Whether the callback sees each operation."""
        return _address_of(self._params.cb_eval) == _address_of(self._watch.callback)

    def show_operations(self) -> None:
        """Have each operation shown to the callback, which slows each step on a GPU. llama.cpp takes a callback only when a context is opened,
        so one that was opened without is opened again, and gets its state back.

        Raises:
            UnsupportedError: why it cannot be, such as a LoRA that it would lose; or there is no memory for it.
        """
        if self.shows_operations:
            return
        if refusal := self._unshown():
            raise UnsupportedError(refusal)
        own = type(self._params).from_buffer_copy(self._params)
        own.cb_eval = self._watch.callback
        self._handle.reopen(own, self._adopt)

    def _unshown(self) -> str | None:
        """Why operations cannot be shown, in a sentence; None if they can, or are."""
        if self.shows_operations:
            return None
        if _address_of(self._params.cb_eval):
            return "this context has a callback already, and it can have only one"
        if _address(self._ctx) in _adapted:
            return _ADAPTED_PLAIN
        if self._is_moved:
            return "positions were moved, and their keys are turned with the next token; evaluate one first"
        return None

    # -- the setting ---------------------------------------------------------------------------------------------------

    def set(self, config: PCDConfig | None, combine: bool = True) -> str | None:
        if config is not None and os.environ.get("PYPCD_DISABLE", "") not in ("", "0"):
            self._config = None
            return "PYPCD_DISABLE is set in the environment"
        refusal = None if config is None else self.refusal(config)
        if config is not None and refusal is not None:
            raise UnsupportedError(f"PCD ({config.describe()}) cannot run here: {refusal}")
        if not combine:
            raise UnsupportedError(only_native("a sampler that contrasts"))
        if config is not None and _rotates(config, "separate"):
            self._open_second(config)
        if is_ours := sees_operations(config):
            self.show_operations()
        self._watch.rotation = self._rotation if is_ours else None
        if not _rotates(config, "rerotated"):
            self._watch.see = None
        elif self._watch.see is None:
            self._keys.forget()  # what was written meanwhile was not seen
            self._watch.see = self._keys.see
        self._config = config
        return None

    def trim(self) -> None:
        """Free the second context or the second keys, if the setting in force does not need them."""
        if not _rotates(self._config, "separate"):
            self._close_second()
        if not _rotates(self._config, "rerotated"):
            self._keys.close()

    def refusal(self, config: PCDConfig) -> str | None:
        what = needs(config)
        if what or self._refusal or not _rotates(config):
            return only_native(what) if what else self._refusal
        if llama_cpp.llama_model_rope_type(self._model) == llama_cpp.LLAMA_ROPE_TYPE_NONE:
            return "this model has no rotary positions to over-rotate; use perturbation=none with a window"
        if config.cache == "separate" and _address(self._ctx) in _adapted:
            return _ADAPTED
        if config.cache == "rerotated" and self._params.type_k not in TYPES:
            return "second keys are rotated in f16 and f32 alone; open the model without type_k, or use cache=shared"
        return unknown_layout() or (self._unshown() if sees_operations(config) else None)

    def _open_second(self, config: PCDConfig) -> None:
        type_k = FIELDS["type_k_over"].to_number(config.type_k_over)
        if self._second is None or self._second.type_k != type_k:
            self._close_second()
            self._second = Second(self._handle, self._model, self._params, type_k)
            self._closing.callback(self._second.close)
        table = _table(config)
        self._second.turn(table, lambda n_rot: formula.rho(n_rot, **table))

    def _close_second(self) -> None:
        if self._second is not None:
            self._second.close()
        self._second = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def set_tokens(self, tokens: Sequence[int], seq_id: int = 0) -> None:
        self._texts[seq_id] = list(tokens)
        self.forget_answers(seq_id)

    def forget(self) -> None:
        """The context has another text now, of which nothing is known."""
        self._asked, self._is_theirs = [], True
        self.forget_texts()
        self.forget_answers()

    # -- the tokens of each sequence, which a second context evaluates (cache="separate") -------------------------------

    def forget_texts(self) -> None:
        self._keys.forget()
        seqs = range(llama_cpp.llama_n_seq_max(self._ctx))
        self._texts = {seq: None for seq in seqs if llama_cpp.llama_memory_seq_pos_max(self._memory, seq) >= 0}

    def shifted(self, *_: object) -> None:
        """llama_memory_seq_add or llama_memory_seq_div was called."""
        self._is_moved = True
        self.forget_texts()

    def removed(self, seq: int, begin: int, end: int) -> None:
        """llama_memory_seq_rm was called."""
        for one in list(self._texts) if seq < 0 else [seq]:
            text = self._texts.get(one, [])
            if begin <= 0 and end < 0:
                self._texts.pop(one, None)
                if self._second is not None:
                    self._second.forget(text)
            elif text is not None and 0 <= end < len(text):
                self._texts[one] = None
            elif text is not None:
                del text[max(begin, 0) :]

    def copied(self, source: int, target: int, begin: int, end: int) -> None:
        """llama_memory_seq_cp was called."""
        text, before = self._texts.get(source, []), self._texts.get(target, [])
        if text is not None and before is not None and len(before) == max(begin, 0):
            self._texts[target] = before + text[len(before) : end if end >= 0 else None]
        elif source != target:
            self._texts[target] = None

    def _note(self, tokens: Sequence[_Token]) -> None:
        """These are in memory."""
        self._is_moved = False
        for one in tokens:
            for seq in one.seqs:
                text = self._texts.setdefault(seq, [])
                if text is not None and one.pos == len(text) and one.token >= 0:
                    text.append(one.token)
                else:
                    self._texts[seq] = None

    def stats(self) -> PCDStats:
        rows = [one.row for one in self._asked if one.row is not None]
        arrays = [array for row in rows for array in (row.standard, row.local, row.contrasted, row.shown)]
        return PCDStats(
            **self._counts,
            last_fallback=self._last_fallback,
            second_bytes=self._keys.memory.n_bytes + (self._second.n_bytes if self._second else 0),
            row_bytes=sum(array.nbytes for array in arrays if array is not None),
        )

    def init_sampler(self, row: int) -> Any:
        raise UnsupportedError(only_native("a sampler that contrasts"))

    # -- answers (min_first_entropy), by the rules of llama_pcd_begin() in cpp/llama-pcd.h -----------------------------

    def begin_answer(self, pos: int, seq_id: int = 0) -> None:
        self._answers[seq_id] = _Answer(pos)

    def forget_answers(self, seq: int | None = None) -> None:
        for known in list(self._answers) if seq is None else [seq]:
            self._answers.pop(known, None)

    def copy_answer(self, source: int, target: int) -> None:
        self.forget_answers(target)
        if source in self._answers:
            self._answers[target] = dataclasses.replace(self._answers[source])

    def _begins(self, seq: int, pos: int, asked: bool) -> bool:
        """Note a token; returns whether its row begins an answer."""
        answer = self._answers.get(seq)
        begun = answer is not None and answer.entropy is not None
        if answer is not None and not begun and pos < answer.first:
            return False  # text before the position that was named
        if not asked:
            self.forget_answers(seq)
        elif not begun:
            self._answers[seq] = _Answer(pos, math.inf)
        return asked and not begun

    def _is_early(self, config: PCDConfig, seq: int, pos: int) -> bool:
        if pos + 1 < config.min_context:
            return True
        answer = self._answers.get(seq)
        if answer is None or answer.entropy is None or not config.min_first_entropy:
            return False
        return answer.first + 1 < config.min_context or answer.entropy < config.min_first_entropy

    # -- decoding ------------------------------------------------------------------------------------------------------

    def decode(self, batch: Any) -> int:
        """llama_decode, with the twins of the rows that are asked for.

        Returns:
            Its status. If a twin cannot be evaluated, its token goes, and those of the same batch that come after it.
        """
        return self._decode(batch, is_evaluated=False)

    def decoded(self, batch: Any) -> int:
        """The same for a batch that somebody else has just given to llama_decode."""
        return 0 if self._is_evaluating else self._decode(batch, is_evaluated=True)

    def _decode(self, batch: Any, is_evaluated: bool) -> int:
        self._asked, self._is_theirs = [], True
        config, tokens = self._config, self._read(batch, is_evaluated)
        if is_evaluated:
            self._note(tokens)
        if config is None or not batch.token:  # off, or a picture
            self._answers.clear()
            return 0 if is_evaluated else self._evaluate(batch, tokens)
        self._begin(config, tokens, is_evaluated)
        asked = [one for one in tokens if one.asked]
        if all(one.early for one in asked):
            status = 0 if is_evaluated else self._evaluate(batch, tokens)
            self._counts["n_skipped"] += len(asked)
        elif self._fuses(config, tokens) and not is_evaluated:
            status = self._fused(config, batch, tokens)
        else:
            status = self._alternate(config, batch, tokens, is_evaluated)
        if status != 0:
            return status
        self._counts["n_tokens"] += len(asked)
        self._asked = asked
        for one in asked:
            if one.first is one and one.row is not None:
                for seq in one.seqs:
                    self._answers[seq].entropy = one.row.entropy
        return 0

    def _read(self, batch: Any, is_evaluated: bool) -> list[_Token]:
        n = batch.n_tokens
        begin = 0  # of a batch without positions: behind its sequence
        if not batch.pos:
            end = llama_cpp.llama_memory_seq_pos_max(self._memory, batch.seq_id[0][0] if batch.seq_id else 0) + 1
            begin = end - n if is_evaluated else end
        tokens: list[_Token] = []
        for i in range(n):
            seqs = [batch.seq_id[i][k] for k in range(batch.n_seq_id[i])] if batch.seq_id else [0]
            asked = bool(batch.logits[i]) if batch.logits else i == n - 1
            token, pos = batch.token[i] if batch.token else -1, batch.pos[i] if batch.pos else begin + i
            tokens.append(_Token(i, token, pos, seqs, asked and not self._is_suspended))
        return tokens

    def _begin(self, config: PCDConfig, tokens: Sequence[_Token], is_evaluated: bool) -> None:
        """Note where answers begin, and what a floor leaves plain."""
        firsts: dict[int, _Token] = {}
        for one in tokens:
            for seq in one.seqs:
                if self._begins(seq, one.pos, one.asked):
                    firsts[seq] = one
            one.early, one.first = self._is_early(config, one.parent, one.pos), firsts.get(one.parent)
        highest = max((seq for one in tokens for seq in one.seqs), default=0)
        if self._twin_seqs and highest >= self._twin_seqs[0]:
            if is_evaluated:
                self._take_back(tokens)
            raise self._taken(highest)

    def _fuses(self, config: PCDConfig, tokens: Sequence[_Token]) -> bool:
        """Whether tokens and twins go in one batch: each token is a step of a text, and its twin is needed or asked for."""
        n, seqs = len(tokens), [seq for one in tokens for seq in one.seqs]
        # two of one sequence: the later one's twin sees the earlier one, which is not in memory yet
        if any(one.early or not one.asked for one in tokens) or len(set(seqs)) < len(seqs):
            return False
        if _rotates(config) or config.gamma == 1 or n > len(self._twin_seqs) or 2 * n > self._n_batch:
            return False
        if config.evaluation == "auto":
            begins = config.min_first_entropy and any(one.first is one for one in tokens)
            return not (config.relative_top or config.min_entropy or begins)
        return config.evaluation == "fused"

    def _fused(self, config: PCDConfig, batch: Any, tokens: Sequence[_Token]) -> int:
        n = len(tokens)
        with self._twins_of(config, tokens) as twins:
            status = self._evaluate_tokens([*twins, *tokens])
        if status == 1:  # no free cells for all of them
            return self._alternate(config, batch, tokens, False)
        if status == 0:
            self._counts["n_fused"] += 1
            self._counts["n_twins"] += n
            for k, one in enumerate(tokens):
                one.row = _Row(self._copy(n + k), self._copy(k))
            for k, one in enumerate(tokens):  # it is found under its index and, counted from the end, behind the twins
                self._view(k)[:] = self._view(n + k)[:] = self._shown(config, one)
        return status

    def _alternate(self, config: PCDConfig, batch: Any, tokens: Sequence[_Token], is_evaluated: bool) -> int:
        """A batch, and then the twins that are needed."""
        self._counts["n_alternate"] += 1
        status = 0 if is_evaluated else self._evaluate(batch, tokens)
        if status != 0:
            return status
        places = {one.index: one for one in tokens if one.asked}  # of rows in llama.cpp's memory
        asked = list(places.values())
        for one in asked:
            one.row = _Row(self._copy(one.index))
        n_needed = sum(self._needs_twin(config, one) for one in asked)
        self._counts["n_skipped"] += len(asked) - n_needed
        if n_needed:
            status = -1
            try:
                if _rotates(config, "separate"):
                    status = self._add_separate(asked)
                else:
                    status, places = self._add_twins(config, batch, tokens, places)
            finally:
                if status != 0:
                    self._take_back(tokens)
            if status != 0:
                return status
        for one in asked:
            self._shown(config, one)
        for place, one in places.items():
            self._view(place)[:] = self._shown(config, one)
        return 0

    def _add_twins(
        self, config: PCDConfig, batch: Any, tokens: Sequence[_Token], places: dict[int, _Token]
    ) -> tuple[int, dict[int, _Token]]:
        """The twins of a batch. Returns the status, and where llama.cpp has rows for which tokens then.

        The twins' rows take the place of those before. Each keeps its rank among them, since all that were asked for get one. If they
        are too many for one batch, their tokens are evaluated once more, for the rows.
        """
        asked, n = list(places.values()), self._n_together
        status = 0
        for k in range(0, len(asked), n):
            status = status or self._evaluate_twins(config, asked[k : k + n])
        if status == 1:  # no free cells
            self._is_theirs = len(tokens) == 1
            return self._in_turn(config, tokens), {-1: tokens[-1]} if tokens[-1].asked else {}
        if status == 0 and len(asked) > n:
            self._take_back(tokens)
            return self._evaluate(batch, tokens), places
        self._is_theirs = len(asked) == len(tokens)
        return status, dict(enumerate(asked))

    def _add_separate(self, asked: Sequence[_Token]) -> int:
        """The rows of the second context."""
        if _address(self._ctx) in _adapted:  # since the setting is in force
            raise UnsupportedError(_ADAPTED)
        for seq in sorted({one.parent for one in asked}):
            those, text = [one for one in asked if one.parent == seq], self._texts[seq]
            if text is None:
                raise UnsupportedError(_UNSEEN)
            assert self._second is not None
            status, rows = self._second.rows(text, [one.pos for one in those], self.abort)
            if status != 0:
                return status
            for one in those:
                one.known().local = rows[one.pos]
            self._counts["n_caught_up"] += self._second.n_evaluated - len(those)
        self._counts["n_separate"] += 1
        self._counts["n_twins"] += len(asked)
        return 0

    def _fall_back(self, why: str) -> None:
        self._counts["n_fallbacks"] += 1
        self._last_fallback = why

    def _evaluate_twins(self, config: PCDConfig, tokens: Sequence[_Token]) -> int:
        """The twins of tokens that are in memory."""
        with self._twins_of(config, tokens) as twins, self._turned_for(config, tokens, twins):
            status = self._evaluate_tokens(twins)
        if status == 0 and _rotates(config):
            self._rotation.check()
            if config.cache == "rerotated":
                self._keys.check()
            if config.evaluation == "fused":
                self._fall_back(_NOT_FUSED)
        if status == 0:
            self._counts["n_twins"] += len(tokens)
            for k, one in enumerate(tokens):
                one.known().local = self._copy(k)
        return status

    @contextlib.contextmanager
    def _turned_for(self, config: PCDConfig, tokens: Sequence[_Token], twins: Sequence[_Token]) -> Iterator[None]:
        """A block in which the twins of tokens are evaluated, over-rotated if their setting is. A window has them in other sequences."""
        if not _rotates(config):
            yield
            return
        table = _table(config)
        rho = lambda n_rot: formula.rho(n_rot, **table)
        try:
            if config.cache == "rerotated":
                if self._has_sections and any(self._texts.get(one.parent, []) is None for one in tokens):
                    raise UnsupportedError(_PICTURES)
                self._keys.begin(rho, table, [(one.parent, _seen(config, one.pos)) for one in twins])
            self._rotation.turn(self._ctx, rho)
            yield
        finally:  # whatever interrupts it, what comes next is not over-rotated
            try:
                self._rotation.turn(self._ctx, None)
            finally:
                self._keys.end()

    def _in_turn(self, config: PCDConfig, tokens: Sequence[_Token]) -> int:
        """The same in a memory that is full: each token gives its cell to its twin, and is evaluated again."""
        begin = next(k for k, one in enumerate(tokens) if one.asked)
        self._take_back(tokens[begin:])
        self._counts["n_sequential"] += 1
        self._fall_back(_NO_ROOM)
        for one in tokens[begin:]:
            status = self._evaluate_twins(config, [one]) if one.asked else 0
            status = status or self._evaluate_tokens([one])
            if status != 0:
                return status
        return 0

    @contextlib.contextmanager
    def _twins_of(self, config: PCDConfig, tokens: Sequence[_Token]) -> Iterator[list[_Token]]:
        """A block with the twins of some tokens: each in a sequence that has the cells it sees. Nothing of it is left behind."""
        seqs = self._twin_seqs[: len(tokens)]
        for seq in seqs:
            if llama_cpp.llama_memory_seq_pos_max(self._memory, seq) >= 0:
                raise self._taken(seq)
        try:
            for one, seq in zip(tokens, seqs):
                for part in _seen(config, one.pos):
                    if part:
                        llama_cpp.llama_memory_seq_cp(self._memory, one.parent, seq, part.start, part.stop)
            yield [dataclasses.replace(one, seqs=[seq], asked=True) for one, seq in zip(tokens, seqs)]
        finally:
            for seq in seqs:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, -1, -1)

    def _taken(self, seq: int) -> UnsupportedError:
        return UnsupportedError(
            f"sequence {seq} has tokens, but ids from {self._twin_seqs[0]} on belong to PCD's twins; open the model with a larger "
            "n_seq_max"
        )

    def _take_back(self, tokens: Sequence[_Token]) -> None:
        for one in tokens:
            for seq in one.seqs:
                llama_cpp.llama_memory_seq_rm(self._memory, seq, one.pos, -1)

    def _evaluate(self, batch: Any, tokens: Sequence[_Token]) -> int:
        self._is_evaluating = True
        try:
            status = int(llama_cpp.llama_decode(self._ctx, batch))
        finally:
            self._is_evaluating = False
        if status == 0:
            self._note(tokens)
        self._watch.check()
        return status

    def _evaluate_tokens(self, tokens: Sequence[_Token]) -> int:
        with batch_of([(one.token, one.pos, one.seqs, one.asked) for one in tokens]) as batch:
            return self._evaluate(batch, tokens)

    # -- the contrast --------------------------------------------------------------------------------------------------

    def _is_plain(self, config: PCDConfig, one: _Token) -> bool:
        """Whether a floor leaves a row plain."""
        if one.early or (config.min_entropy and one.known().entropy < config.min_entropy):
            return True
        first = one.first and one.first.row
        return bool(config.min_first_entropy and first and first.entropy < config.min_first_entropy)

    def _needs_twin(self, config: PCDConfig, one: _Token) -> bool:
        return len(self._kept(config, one.known())) > 1 and not self._is_plain(config, one)

    def _kept(self, config: PCDConfig, row: _Row) -> npt.NDArray[np.intp]:
        if row.kept is None:
            row.kept = formula.plausible(row.standard, gamma=config.gamma, relative_top=config.relative_top)
        return row.kept

    def _shown(self, config: PCDConfig, one: _Token) -> Logits:
        """What callers see of a row."""
        row = one.known()
        if row.shown is None:
            kept = self._kept(config, row)
            if not len(kept) or self._is_plain(config, one):
                row.contrasted = row.shown = row.standard
                return row.shown
            if len(kept) > 1 and row.local is not None:
                row.beta = config.beta
            local = row.standard if row.local is None else row.local
            row.contrasted = formula.tilt(row.standard, local, kept, row.beta or 0.0).astype(np.float32)
            row.shown = formula.put_behind(row.contrasted, row.standard).astype(np.float32)
        return row.shown

    # -- rows ----------------------------------------------------------------------------------------------------------

    def logits(self, i: int) -> PCDLogits | None:
        one = self._find(i)
        if one is None:
            return None
        row = one.row or _Row(self._view(one.index))
        contrasted = row.standard if row.contrasted is None else row.contrasted
        return PCDLogits(row.standard, row.local, contrasted, row.beta)

    def row(self, i: int) -> Logits | None:
        """What callers see of entry i of the last batch, if llama.cpp has no row under this index."""
        one = None if self._is_theirs else self._find(i)
        return one.row.shown if one is not None and one.row is not None else None

    def rows(self) -> Logits | None:
        """All rows of the last batch that were asked for, [n, n_vocab], if llama.cpp has not these."""
        if self._is_theirs:
            return None
        return np.stack([row for row in (one.known().shown for one in self._asked) if row is not None])

    def _find(self, i: int) -> _Token | None:
        if i < 0:
            return self._asked[i] if -i <= len(self._asked) else None
        return next((one for one in self._asked if one.index == i), None)

    def _copy(self, i: int) -> Logits:
        return self._view(i).copy()

    def _view(self, i: int) -> Logits:
        """llama.cpp's own memory, which the next evaluation overwrites."""
        pointer = llama_cpp.llama_get_logits_ith(self._ctx, i)
        if not pointer:
            raise PCDError(f"llama.cpp has no logits for row {i}: {_log.reason()}")
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))
