"""What twins see is what is in memory then, whatever was done to it between two steps: masks, places, windows, room.

Batches are passed to llama_decode directly. The oracle is the same library with PCD off, on memory that went through the same
edits: a token's L is its row, and the L* of a twin with a window is its row on a copy of its sequence without the cells that
the twin must not see. If nothing is turned and nothing hidden, L* is L."""

from __future__ import annotations

from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import OK, Native, Setting, decode_batch, set_seq, turn_off, turn_on
from conftest import TOKENS, close, flash, tolerance
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import pypcd

COPY = 9  # the sequence of an oracle
SETTINGS: dict[str, Setting] = {
    "shared": {"cache": "shared", "base_ratio": 1.0},
    "rerotated": {"base_ratio": 1.0},
    "window": {"perturbation": "none", "window": 7, "n_sink": 2},
    "window-all": {"perturbation": "none", "window": 7, "n_sink": 0},
}


FLASH = flash(True)
SHORT_TEXT = 30
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{name: ("llama", name, {}) for name in SETTINGS},
    "flash": ("llama", "rerotated", FLASH),
    "flash-window": ("llama", "window", FLASH),
    "sliding": ("gemma3", "rerotated", {"swa_full": True}),
    "sliding-window": ("gemma3", "window", {"swa_full": True}),
    "m-rope": ("qwen2vl", "shared", {}),
}


class Pair:
    """A context with PCD and a stock one that go through the same; every row is checked."""

    def __init__(self, native: Native, arch: str, name: str, more: dict[str, Any], evaluation: str = "fused") -> None:
        """With fused steps each uses the graph of the one before it, as far as it can."""
        params = {"n_seq_max": 16, "n_ctx": 512, **more}
        setting: Setting = {**SETTINGS[name], "evaluation": evaluation}
        self.pcd, self.stock = native(arch, setting, **params), native(arch, **params)
        self.setting, self.on, self.limit = setting, True, self.pcd.limit
        if more is FLASH:  # each may differ so much from float64
            self.limit = 2 * tolerance(self.pcd.path, flash_attn=True)
        self.seqs: dict[int, Setting] = {}
        self.copied: set[int] = set()  # sequences that may share cells with another one

    def both(self, call: Any, *args: Any) -> None:
        for context in (self.pcd, self.stock):
            call(context.memory, *args)

    def decode(self, seq: int, n: int, wanted: bool) -> None:
        """Tokens behind a sequence, the last one's row checked if it is wanted."""
        first = self.stock.span(seq)[1] + 1
        tokens = [TOKENS[(first * 7 + seq + i) % len(TOKENS)] for i in range(n)]
        over = self.oracle(seq, first, tokens) if wanted and self.on else None
        for context in (self.pcd, self.stock):
            assert context.decode(tokens, first, out=[n - 1] if wanted else [], seq=seq) == 0
        if wanted and self.on:
            self.check(n - 1, over)

    def step(self, *seqs: int) -> None:
        """One token behind each of these sequences that are not empty, in one batch, every row checked."""
        firsts = {seq: self.stock.span(seq)[1] + 1 for seq in seqs if self.stock.span(seq)[1] >= 0}
        entries = [(TOKENS[(p * 7 + seq) % len(TOKENS)], p, [seq], True) for seq, p in firsts.items()]
        overs = [self.oracle(seqs[0], p, [token]) for token, p, seqs, _ in entries] if self.on else []
        if not entries:
            return
        for context in (self.pcd, self.stock):
            assert decode_batch(context, entries) == 0
        for i, over in enumerate(overs):
            self.check(i, over)

    def check(self, i: int, over: np.ndarray | None) -> None:
        standard, seen = self.pcd.rows(i)
        close(standard, self.stock.seen(i), self.limit)
        close(seen, standard if over is None else over, self.limit)

    def oracle(self, seq: int, first: int, tokens: list[int]) -> np.ndarray | None:
        """L* by stock llama.cpp, whose memory is as before afterwards; None: it is L."""
        setting = self.seqs.get(seq, self.setting)
        if "window" not in setting:
            return None
        last = first + len(tokens) - 1
        memory, config = self.stock.memory, pypcd.PCDConfig(**setting)
        llama_cpp.llama_memory_seq_cp(memory, seq, COPY, -1, -1)
        if len(tokens) > 1:
            assert self.stock.decode(tokens[:-1], first, out=[], seq=COPY) == 0
        begin = last + 1 - config.window
        if begin > config.n_sink:
            llama_cpp.llama_memory_seq_rm(memory, COPY, config.n_sink, begin)
        assert self.stock.decode(tokens[-1:], last, seq=COPY) == 0
        row = self.stock.seen(0)
        llama_cpp.llama_memory_seq_rm(memory, COPY, -1, -1)
        return row

    def copy(self, source: int, target: int) -> None:
        self.forget(target)
        self.both(llama_cpp.llama_memory_seq_cp, source, target, -1, -1)
        self.copied |= {source, target}
        if source in self.seqs:
            self.seqs[target] = self.seqs[source]

    def forget(self, seq: int) -> None:
        """A sequence and its setting."""
        self.both(llama_cpp.llama_memory_seq_rm, seq, -1, -1)
        self.seqs.pop(seq, None)

    def cut(self, seq: int, share: float) -> None:
        """Rewind a sequence."""
        last = self.stock.span(seq)[1]
        self.both(llama_cpp.llama_memory_seq_rm, seq, int(share * (last + 1)), -1)

    def shift(self, seq: int, share: float) -> None:
        """Take a part out of the middle of a sequence and close the gap. Cells that another one has would move there too."""
        first, last = self.stock.span(seq)
        p0, p1 = 1 + int(share * (last // 2)), 1 + int(share * last)
        if first != 0 or not 1 < p0 < p1 < last or seq in self.copied:
            return
        self.both(llama_cpp.llama_memory_seq_rm, seq, p0, p1)
        self.both(llama_cpp.llama_memory_seq_add, seq, p1, -1, p0 - p1)

    def reload(self, seq: int) -> None:
        """Save a sequence and load it into cells that are found anew."""
        states = [context.save(seq) for context in (self.pcd, self.stock)]
        self.forget(seq)
        for context, state in zip((self.pcd, self.stock), states):
            context.restore(state, seq)

    def switch(self) -> None:
        """PCD off, or on again."""
        self.on = not self.on
        if self.on:
            turn_on(self.pcd, self.setting)
        else:
            turn_off(self.pcd)

    def give(self, seq: int, window: int, n_sink: int) -> None:
        """A sequence gets a setting of its own, if the others have windows too."""
        if "window" in self.setting and self.on:
            self.seqs[seq] = {**self.setting, "window": window, "n_sink": n_sink}
            assert set_seq(self.pcd, seq, self.seqs[seq]) == OK

    def hole(self, seq: int, a: float = 0.3, b: float = 0.5) -> None:
        last = self.stock.span(seq)[1]
        p0, p1 = sorted((1 + int(a * last), 1 + int(b * last)))
        if last > 2 and p1 <= last:
            self.both(llama_cpp.llama_memory_seq_rm, seq, p0, p1)

    def part(self, source: int, target: int, a: float = 0.3, b: float = 0.7) -> None:
        """Some cells of one sequence are another's too, which has nothing else."""
        last = self.stock.span(source)[1]
        p0, p1 = sorted((int(a * last), int(b * last) + 1))
        if source != target and last > 2:
            self.forget(target)
            self.both(llama_cpp.llama_memory_seq_cp, source, target, p0, p1)
            self.copied |= {source, target}

    def half(self, seq: int) -> None:
        """Every second position, closed up."""
        if self.stock.span(seq)[0] == 0 and seq not in self.copied:
            self.both(llama_cpp.llama_memory_seq_div, seq, 0, -1, 2)

    def keep(self, seq: int) -> None:
        if self.stock.span(seq)[1] >= 0:
            self.both(llama_cpp.llama_memory_seq_keep, seq)
            self.seqs = {one: own for one, own in self.seqs.items() if one == seq}

    def clear(self) -> None:
        for context in (self.pcd, self.stock):
            llama_cpp.llama_memory_clear(context.memory, True)
        self.copied.clear()
        self.seqs.clear()
        self.decode(0, 5, False)


def can(form: str, edit: str) -> bool:
    """Positions of M-RoPE do not shift."""
    return form != "m-rope" or edit not in ("shift", "half")


# Behind a sliding window llama.cpp gives a text's cells to other tokens, when depends on what is free, and a twin needs a cell for
# a moment. A text that then goes back to where it saw them misses them: which ones is nobody's promise, stock's neither.
GOES_BACK = ("cut", "part", "half", "shift")
SEQ, SHARE = st.integers(0, 2), st.floats(0.05, 0.95)
OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.lists(SEQ, min_size=1, max_size=3, unique=True), st.integers(1, 4)),
    st.tuples(st.just("step"), st.just([0, 1]), st.integers(1, 4)),
    st.tuples(st.just("decode"), SEQ, st.integers(1, 12), st.booleans()),
    st.tuples(st.just("copy"), SEQ, SEQ),
    st.tuples(st.just("part"), SEQ, SEQ, SHARE, SHARE),
    st.tuples(st.just("hole"), SEQ, SHARE, SHARE),
    st.tuples(st.just("cut"), SEQ, SHARE),
    st.tuples(st.just("shift"), SEQ, SHARE),
    st.tuples(st.just("half"), SEQ),
    st.tuples(st.just("keep"), SEQ),
    st.tuples(st.just("reload"), SEQ),
    st.tuples(st.just("clear")),
    st.tuples(st.just("switch")),
    st.tuples(st.just("give"), SEQ, st.integers(3, 40), st.integers(0, 5)),
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, min_size=6, max_size=24), evaluation=st.sampled_from(["fused", "alternate"]))
def test_steps_see_what_is_in_memory_between_any_edits(
    form: str, operations: list[Any], evaluation: str, native: Native
) -> None:
    pair = Pair(native, *FORMS[form], evaluation)
    for seq in (0, 1):
        pair.decode(seq, SHORT_TEXT, False)
    for kind, *args in operations:
        note(f"{kind} {args}")
        last = pair.stock.span(args[0])[1] if args and kind != "step" else 0
        if kind == "step":
            for _ in range(args[1]):
                pair.step(*args[0])
        elif kind == "decode":
            if last + args[1] < 120:
                pair.decode(*args)
        elif form.startswith("sliding") and kind in GOES_BACK:
            continue
        elif can(form, kind) and last >= (1 if kind == "cut" else 0) and not (kind == "copy" and args[0] == args[1]):
            getattr(pair, kind)(*args)
    if not pair.on:
        pair.switch()
    pair.step(0, 1, 2)
    pair.step(0, 1, 2)
