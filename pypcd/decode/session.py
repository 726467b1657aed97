"""A model's context, used step by step: one prompt, and sequences that continue it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.decode.prompt_cache import MIN_TOKENS, N_LEFT, PromptCache
from pypcd.errors import InputError, PCDError

if TYPE_CHECKING:
    from pypcd.find.heads import Heads
    from pypcd.llama import Llama
    from pypcd.settings.config import PCDConfig

__all__ = ["Held", "Logits", "Rows2D", "Session"]

Logits = npt.NDArray[np.float32]  # [n_vocab]
Rows2D = npt.NDArray[np.float32]  # [n_sequences, n_vocab]


@dataclasses.dataclass
class Held:
    """What sequence 0 of a context holds, for all sessions on it."""

    tokens: list[int] = dataclasses.field(default_factory=list)  # of the prompt
    n_text: int = 0  # of these, those that were evaluated by themselves
    n: int = 0  # positions
    kind: object = None  # as Session.start() has it
    n_changes: int = -1  # the model's own count, when the prompt was evaluated


class Session:
    """One model's context. Sequence 0 holds the prompt; others are made by fork() or read().

    A prompt, all but its last token, is evaluated with PCD off, and stays there: every answer to it starts from the same keys and
    values, and is evaluated in one way (PCDConfig.repeatable). The text at a prompt's beginning is evaluated by itself, and stays for other
    prompts that begin with it, and on disk. So an answer does not depend on earlier ones, on their order, or on how busy the machine is.

    Attributes:
        n_text: how many of the next prompt's first tokens are such a text (prompt.Laid); 0: none.
        n_evaluated: prompt tokens evaluated so far.
        refusals: why this model cannot run a method, as far as known; for Method.

    Args:
        repeatable: False: whatever the context holds of a prompt is used, and an answer stays in it for the prompt that goes on from it. So
            a conversation is not read again.
        cache: where texts are kept on disk; None: nowhere.
        names: of the texts, for people who list what is on disk.

    Raises:
        UnsupportedError: the model has an encoder, or keeps no keys.
    """

    def __init__(
        self, llm: Llama, *, repeatable: bool = True, cache: PromptCache | None = None, names: Sequence[str] = ()
    ) -> None:
        engine.check_decoder(llm)
        self.llm, self.repeatable = llm, repeatable
        self.cache, self.names = cache, names
        self.n_text = self.n_evaluated = 0
        self.refusals: dict[tuple[object, bool], str | None] = {}
        if llm._held is None:
            llm._held = Held()
        if llm._open is not None:  # an answer that nobody reads on
            llm._open.finish()
        self._before: tuple[PCDConfig | None] | None = None  # the model's setting, while another is in force
        self._own: PCDConfig | None = None  # that other one
        self._undo = contextlib.ExitStack()
        self._n_past: dict[int, int] = {}

    def start(
        self,
        tokens: Sequence[int],
        setting: PCDConfig | None = None,
        *,
        kind: object = None,
        read: Callable[[Sequence[int]], int] | None = None,
    ) -> Logits:
        """Evaluate a prompt in sequence 0; returns the row after its last token. All other sequences are dropped.

        Args:
            setting: the PCD setting from the prompt's last token on.
            kind: what the cached prompt depends on besides its tokens; if it differs, the prompt is evaluated again.
            read: evaluates the prompt without its last token in sequence 0 of the empty cache, and returns how many
                positions that takes; None: Llama.eval.

        Raises:
            ValueError: the prompt is empty or does not fit in the context.
            PCDError: llama_decode failed.
            UnsupportedError: this model cannot run the setting.
        """
        llm, tokens = self.llm, list(tokens)
        if not tokens or len(tokens) >= llm.n_ctx():
            raise InputError(
                f"the prompt has {len(tokens)} tokens; allowed: 1 to {llm.n_ctx() - 1}, a context of {llm.n_ctx()} "
                "with room for an answer"
            )
        self.plainly()
        if engine.sees_operations(setting):
            self._show_operations()
        held = llm._held
        if kind is None:
            self.hold(tokens[:-1], self.n_text)
        elif not (self._is_mine and (kind, tokens[:-1]) == (held.kind, held.tokens) and self._rewind(held.n)):
            self.clear()
            n = (read or self._read)(tokens[:-1])
            self.n_evaluated += len(tokens) - 1 if read else 0
            llm._held = Held(tokens[:-1], 0, n, kind, llm._n_changes)
        llm.pcd = setting and (setting.repeatable() if self.repeatable else setting)
        self._own = llm.pcd
        self._n_past = {0: llm._held.n}
        self.n_evaluated += 1
        return self.step({0: tokens[-1]})[0]

    @property
    def _is_mine(self) -> bool:
        """Whether no other code has evaluated in this context."""
        return bool(self.llm._held.n_changes == self.llm._n_changes)

    def hold(self, tokens: Sequence[int], n_text: int = 0) -> None:
        """Make sequence 0 hold a prompt and no more, evaluated with PCD off. All other sequences are dropped.

        Args:
            n_text: as the attribute.
        """
        self.plainly()
        tokens, n = list(tokens), min(max(n_text - N_LEFT, 0), len(tokens))
        same = self._n_usable(tokens, n) if self._is_mine and self.llm._held.kind is None else 0
        if not (same and self._rewind(same)):
            self.clear()
            same = 0
        self._n_past = {}
        try:
            if same < n:
                same = self._read_text(tokens[:n], same)
            self._read(tokens[same:])
        except BaseException:  # Ctrl-C too
            if not engine.rewind(self.llm, self.llm.n_tokens, 0):
                self.clear()
            tokens, n = tokens[: self.llm.n_tokens], 0  # the batches that were finished
            raise
        finally:
            n = n if self.repeatable else -1  # else it may have been read in any way
            self.llm._held = Held(tokens, n, len(tokens), None, self.llm._n_changes)
            self._n_past = {0: len(tokens)}

    def attention(
        self, past: Sequence[int], tokens: Sequence[int], n_text: int = 0, heads: Heads | None = None
    ) -> Mapping[int, npt.NDArray[np.float32]]:
        """How much attention tokens behind a prompt pay to each position, on average over them.

        Args:
            past: the prompt, as hold() has it.
            heads: by layer, as in engine.attention(); None: all.

        Returns:
            layer -> float32[n_heads, len(past) + len(tokens)]
        """
        self._show_operations()
        self.hold(past, n_text)
        return engine.attention(self.llm, past, tokens, [1 / len(tokens)] * len(tokens), heads)

    def _show_operations(self) -> None:
        """Before the text is read: what an answer is must not depend on whether it was read before."""
        if not engine.shows_operations(self.llm):
            self.clear()
            engine.show_operations(self.llm)

    def _n_usable(self, tokens: Sequence[int], n_text: int) -> int:
        """How many tokens of a prompt the context may keep."""
        held = self.llm._held
        if not self.repeatable:
            return self.llm.longest_token_prefix(held.tokens, tokens)
        if (tokens, n_text) == (held.tokens, held.n_text):
            return len(tokens)
        return n_text if n_text == held.n_text and tokens[:n_text] == held.tokens[:n_text] else 0

    def _read_text(self, tokens: Sequence[int], n: int) -> int:
        """Evaluate a text behind its first n tokens, which sequence 0 holds, or put what is on disk there; returns its number of tokens."""
        cache = self.cache if len(tokens) >= MIN_TOKENS else None
        # a file that could not be loaded has emptied the context
        n = (cache.restore(self.llm, tokens) if cache else 0) or min(n, self.llm.n_tokens)
        started = time.perf_counter()
        self._read(tokens[n:])
        if cache and n < len(tokens):
            about = {
                "model": pathlib.Path(self.llm.model_path).name,
                "documents": list(self.names),
                "tokens_per_second": round((len(tokens) - n) / (time.perf_counter() - started), 3),
            }
            cache.keep(self.llm, tokens, about)
        return len(tokens)

    def step(self, tokens: Mapping[int, int]) -> Rows2D:
        """Give sequences their next tokens, all in one batch.

        Returns:
            float32[len(tokens), n_vocab]: their logits, in the same order.
        """
        if self._before is None:
            raise PCDError("this answer has ended, since another one was begun with the same model")
        if not self._is_mine or self.llm.pcd != self._own:
            raise PCDError(
                "this answer cannot go on: since its last token the model was used by another call, or its setting was changed; read "
                "an answer to its end, or close it, before the next call"
            )
        entries = [(token, self._n_past[seq], seq, True) for seq, token in tokens.items()]
        self.decode(entries)
        for seq in tokens:
            self._n_past[seq] += 1
        if 0 in tokens and not self.repeatable:
            self.llm._held.tokens.append(tokens[0])
        return engine.rows(self.llm, len(entries))

    def read(self, seq: int, tokens: Sequence[int]) -> Logits:
        """Evaluate another prompt in a sequence of its own, next to the one in sequence 0.

        Returns:
            float32[n_vocab]: the row after its last token.
        """
        self.drop([seq])
        self._n_past[seq] = len(tokens) - 1
        unseen = [(token, i, seq, False) for i, token in enumerate(tokens[:-1])]
        for i in range(0, len(unseen), self.llm.n_batch):
            self.decode(unseen[i : i + self.llm.n_batch])
        self.n_evaluated += len(tokens)
        return self.step({seq: tokens[-1]})[0]

    def fork(self, pairs: Mapping[int, int]) -> None:
        """Make sequences continue others: target -> source. In the cache they share their common part."""
        self.drop(pairs)
        for target, source in pairs.items():
            engine.copy_sequence(self.llm, source, target)
            self._n_past[target] = self._n_past[source]

    def drop(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            engine.rewind(self.llm, 0, seq)
            self._n_past.pop(seq, None)

    def plainly(self) -> None:
        """Switch PCD off, until the answer is finished."""
        if self._before is None:
            self._before = (self.llm.pcd,)
            self.llm._open = self
        self.llm.pcd = self._own = None

    def on_finish(self, undo: Callable[[], object]) -> None:
        """Call something when the answer is finished, or has failed."""
        self._undo.callback(undo)

    def finish(self) -> None:
        """Restore the model to its state after evaluating the prompt, with its own PCD setting; nothing if that is done."""
        if self._before is None:
            return
        try:
            held = self.llm._held
            if self.repeatable and held.n and self._is_mine and not self._rewind(held.n):
                self.clear()
            if held.kind is not None:
                self.llm.reset()  # so that plain decoding does not reuse these keys
        finally:
            self._undo.close()
            if self.llm.pcd == self._own:  # else somebody has assigned another one
                (self.llm.pcd,) = self._before
            self._before = self.llm._open = None

    def clear(self) -> None:
        """Forget the prompt too."""
        engine.clear(self.llm)
        self.llm._held, self._n_past = Held(), {}

    def is_end(self, token: int) -> bool:
        return engine.is_end(self.llm, token)

    def _rewind(self, n: int) -> bool:
        """Go back to the first n positions of the prompt; False if the memory cannot."""
        self.drop([seq for seq in self._n_past if seq])
        if not engine.rewind(self.llm, n, 0):
            return False
        if self.llm._held.kind is None:
            self.llm.input_ids[:n], self.llm.n_tokens = self.llm._held.tokens[:n], n  # eval() goes on from there
        return True

    def _read(self, tokens: Sequence[int]) -> int:
        """Evaluate tokens behind those that sequence 0 holds."""
        if tokens:
            self.llm.eval(tokens)
        self.n_evaluated += len(tokens)
        return len(tokens)

    def decode(self, entries: Sequence[tuple[int, int, int, bool]]) -> None:
        """Evaluate (token, position, sequence, whether its logits are wanted), all in one batch."""
        if not engine.decode(self.llm, entries):
            raise PCDError(
                f"the context of {self.llm.n_ctx()} tokens is full with {len(self._n_past)} sequences; load the model "
                "with a larger n_ctx"
            )
