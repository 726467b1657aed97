"""What the host finds without looking at every cell (masks, places, windows, room) is what a look at every cell would find.

Batches are passed to llama_decode directly. The oracle is the same library with PCD off, on memory that went through the same
edits: a token's L is its row, and the L* of a twin with a window is its row on a copy of its sequence without the cells that
the twin must not see. Where nothing is turned and nothing hidden, L* is L."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp
import numpy as np
import pytest
from batches import SHORT_SLIDING, Context, Native, Setting
from conftest import TOKENS, close
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import pypcd
from pypcd import UnsupportedError, engine
from pypcd.engine import _bindings as _native
from pypcd.engine._pcd import native_params

COPY = 9  # the sequence of an oracle
SETTINGS: dict[str, Setting] = {
    "shared": {"cache": "shared", "base_ratio": 1.0},
    "rerotated": {"base_ratio": 1.0},
    "separate": {"cache": "separate", "base_ratio": 1.0},
    "window": {"perturbation": "none", "window": 7, "n_sink": 2},
    "window-all": {"perturbation": "none", "window": 7, "n_sink": 0},
}


def set_seq(context: Context, seq: int, setting: Setting) -> None:
    error, params = ctypes.create_string_buffer(500), native_params(pypcd.PCDConfig(**setting))
    assert _native.pcd_set_seq(context.ctx, seq, ctypes.byref(params), error, 500) == _native.OK, error.value


class Pair:
    """A context with PCD and a stock one that go through the same; every row is checked."""

    def __init__(self, native: Native, arch: str, setting: Setting, **params: Any) -> None:
        params = {"n_seq_max": 16, "n_ctx": 512, **params}
        self.pcd, self.stock = native(arch, setting, **params), native(arch, **params)
        self.setting, self.on, self.limit = setting, True, self.pcd.limit
        self.seqs: dict[int, Setting] = {}
        self.copied: set[int] = set()  # sequences that may share cells with another one
        self.was_off = False
        self.n_rows = 0

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
            standard, seen = self.pcd.rows(n - 1)
            close(standard, self.stock.seen(n - 1), self.limit)
            close(seen, standard if over is None else over, self.limit)
            self.n_rows += 1

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
        self.both(llama_cpp.llama_memory_seq_rm, target, -1, -1)
        self.both(llama_cpp.llama_memory_seq_cp, source, target, -1, -1)
        self.copied |= {source, target}

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
        for context in (self.pcd, self.stock):
            size = llama_cpp.llama_state_seq_get_size(context.ctx, seq)
            state = (ctypes.c_uint8 * size)()
            assert llama_cpp.llama_state_seq_get_data(context.ctx, state, size, seq) == size
            llama_cpp.llama_memory_seq_rm(context.memory, seq, -1, -1)
            assert llama_cpp.llama_state_seq_set_data(context.ctx, state, size, seq) == size

    def switch(self) -> None:
        """PCD off, or on again."""
        self.on, self.was_off = not self.on, True
        error = ctypes.create_string_buffer(500)
        params = ctypes.byref(native_params(pypcd.PCDConfig(**self.setting))) if self.on else None
        assert _native.pcd_set(self.pcd.ctx, params, error, 500) == _native.OK, error.value


SEQ, SHARE = st.integers(0, 2), st.floats(0.1, 1.0)
OPERATIONS = st.one_of(
    st.tuples(st.just("decode"), SEQ, st.integers(1, 12), st.booleans()),
    st.tuples(st.just("decode"), SEQ, st.just(1), st.just(True)),
    st.tuples(st.just("copy"), SEQ, SEQ),
    st.tuples(st.just("cut"), SEQ, SHARE),
    st.tuples(st.just("shift"), SEQ, SHARE),
    st.tuples(st.just("reload"), SEQ),
    st.tuples(st.just("switch")),
)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=st.lists(OPERATIONS, min_size=6, max_size=24))
def test_rows_are_right_after_any_edits_of_the_memory(name: str, operations: list[Any], native: Native) -> None:
    pair = Pair(native, "llama", SETTINGS[name])
    for kind, *args in operations:
        note(f"{kind} {args}")
        last = pair.stock.span(args[0])[1] if args else -1
        if kind == "copy":
            if args[0] != args[1] and last >= 0:
                pair.copy(*args)
        elif kind == "reload":
            if last >= 0 and name != "separate":  # a state does not know the tokens that a second stream is made from
                pair.reload(*args)
        elif kind == "cut":
            if last > 0:
                pair.cut(*args)
        elif kind == "shift":
            if last > 0 and (
                name != "separate" or not pair.was_off
            ):  # twins that are evaluated later miss what was taken out
                pair.shift(*args)
        elif kind == "decode":
            if last + args[1] < 120:
                pair.decode(*args)
        else:
            pair.switch()
    if not pair.on:
        pair.switch()
    for seq in range(3):
        pair.decode(seq, 1, True)
    assert pair.n_rows >= 3


@pytest.mark.parametrize("name", ["shared", "rerotated", "separate", "window"])
def test_rows_are_right_where_a_sliding_window_starts_over_in_its_cells(name: str, native: Native) -> None:
    """200 tokens through a cache of far fewer sliding cells."""
    setting = {**SETTINGS[name], "n_sink": 0} if "window" in SETTINGS[name] else SETTINGS[name]
    pair = Pair(native, "gemma3", setting, **SHORT_SLIDING, n_seq_max=1)
    wide = pair.setting if "window" not in setting else {**setting, "window": 10**6}
    if wide is not setting:  # a window that hides nothing: L* is L
        error, params = ctypes.create_string_buffer(500), native_params(pypcd.PCDConfig(**wide))
        assert _native.pcd_set(pair.pcd.ctx, ctypes.byref(params), error, 500) == _native.OK
        pair.setting = {}
    for step in range(200):
        pair.decode(0, 1 if step % 3 else 2, True)
    assert pair.n_rows == 200


def test_each_sequence_has_its_own_window(native: Native) -> None:
    """Three texts in one batch, each with the rows that it has alone; also the widest sees no more than its own."""
    own = [{"perturbation": "none", "window": w, "n_sink": k} for w, k in ((3, 0), (12, 4), (40, 1))]
    together = native("llama", {"perturbation": "none", "window": 7}, n_seq_max=3, n_ctx=512)
    alone = [native("llama", setting) for setting in own]
    texts = [TOKENS[:50], TOKENS[50:100], TOKENS[20:70]]
    for seq, setting in enumerate(own):
        set_seq(together, seq, setting)
    for seq, text in enumerate(texts):
        assert together.decode(text[:-1], 0, out=[], seq=seq) == 0
        assert alone[seq].decode(text[:-1], 0, out=[]) == 0
    for step in range(3):
        entries = [(text[-1 - step], 49 + step, seq) for seq, text in enumerate(texts)]
        assert decode_entries(together, entries) == 0
        for seq, (token, pos, _) in enumerate(entries):
            assert alone[seq].decode([token], pos) == 0
            close(together.rows(seq), alone[seq].rows(0), together.limit)
    rows = [together.rows(seq)[1] for seq in range(3)]
    assert min(np.abs(a - b).max() for a, b in ((rows[0], rows[1]), (rows[1], rows[2]))) > 0.05


def decode_entries(context: Context, entries: list[tuple[int, int, int]]) -> int:
    """One token each, all with their logits."""
    batch = llama_cpp.llama_batch_init(len(entries), 0, 1)
    try:
        batch.n_tokens = len(entries)
        for i, (token, pos, seq) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, pos, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        return int(llama_cpp.llama_decode(context.ctx, batch))
    finally:
        llama_cpp.llama_batch_free(batch)


# --- graphs and filled cells ---


@pytest.fixture(scope="module")
def llm(tiny: Any) -> Any:
    llm = pypcd.Llama(str(tiny("llama")), n_ctx=1024, n_threads=1, n_threads_batch=1, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("name", [None, *SETTINGS])
def test_a_graph_is_used_again_until_a_block_of_cells_is_full(name: str | None, llm: Any) -> None:
    llm.pcd = None if name is None else pypcd.PCDConfig(**SETTINGS[name]).repeatable()
    engine.fill_cells(llm, 400)
    steps = engine.timed_steps(llm, TOKENS[:120])[2:]
    assert all(step.n_graphs == 1 for step in steps)
    crossed = [i for i, step in enumerate(steps, 402) if not step.n_reused]
    window = SETTINGS[name].get("window", 0) if name else 0
    block = 64 if name else 256  # llama.cpp's own is 256; with twins, on the CPU, attention ends with a smaller one
    blocks = {
        i
        for i in range(402, 520)
        if i // block != (i - 1) // block or (window and (i - window) // block != (i - window - 1) // block)
    }
    assert len(crossed) <= len(blocks) + 1 and all(min(abs(i - b) for b in blocks) <= 2 for i in crossed), (
        crossed,
        blocks,
    )


def test_a_twin_adds_a_row_to_what_is_copied(llm: Any) -> None:
    stats = {}
    for name in (None, "shared"):
        llm.pcd = None if name is None else pypcd.PCDConfig(**SETTINGS[name]).repeatable()
        engine.fill_cells(llm, 300)
        engine.timed_steps(llm, TOKENS[:2])
        stats[name] = engine.graph_stats(llm)
    plain, twin = stats[None], stats["shared"]
    assert plain.bytes_out == 4 * llm.n_vocab() and twin.bytes_out == 2 * plain.bytes_out
    assert twin.n_nodes > plain.n_nodes and twin.n_splits == plain.n_splits == 1
    assert plain.bytes_in < twin.bytes_in < 3 * plain.bytes_in


@pytest.mark.parametrize("name", [None, *SETTINGS])
def test_filled_cells_are_zeros_that_nothing_was_evaluated_for(name: str | None, llm: Any) -> None:
    """All of a sequence of n zeros weighs the same: beside them a token's row hardly depends on where they are."""
    llm.pcd = None if name is None else pypcd.PCDConfig(**SETTINGS[name])
    before = engine.graph_stats(llm).n_computed
    engine.fill_cells(llm, 1000)
    assert engine.graph_stats(llm).n_computed == before and llm.n_tokens == 1000
    llm.eval([5])
    row = native_standard(llm, name)
    llm.reset()
    engine.fill_cells(llm, 500)
    llm.eval([5])
    assert np.isfinite(row).all() and row.shape == native_standard(llm, name).shape
    llm.reset()


def native_standard(llm: Any, name: str | None) -> np.ndarray:
    return engine.row(llm, 0) if name is None else engine.pcd_logits(llm, 0).standard


@pytest.mark.parametrize("n", [0, -1, 5000])
def test_more_cells_than_there_are_cannot_be_filled(n: int, llm: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"n is {n}; the cells of this context cannot be filled"):
        engine.fill_cells(llm, n)
