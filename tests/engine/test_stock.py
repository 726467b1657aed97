"""The engine "stock": PCD from functions that every libllama has, against the float64 reference, pypcd's own engine and plain rows.

With the stock library in place of pypcd's (`scripts/test --stock`), all but what is compared with pypcd's engine runs on it.
"""

from __future__ import annotations

import ctypes
import re
import signal
from collections.abc import Sequence
from typing import Any

import arch_checks
import llama_cpp
import numpy as np
import pytest
from conftest import (
    TOKENS,
    UNKNOWN,
    Load,
    Tiny,
    check_rows,
    close,
    contrasted,
    expected,
    follow,
    native_row,
    on_stock,
    rounding,
    rounding_of,
    shape,
    tolerance,
    turn,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import FILES, FOLDER
from tiny_gguf import ATTENTION_ARCHS, HYBRID_ARCHS, ROPE_ARCHS

import pypcd
from pypcd import engine
from pypcd.decode import Session
from pypcd.engine import _rotation
from pypcd.engine._calls import batch_of

pytestmark = on_stock
beside_native = pytest.mark.skipif(not engine.is_native(), reason="this process has the stock library")
WINDOW: dict[str, Any] = {"perturbation": "none", "window": 20}
PROMPT = 60
ROTATING: list[tuple[str, dict[str, Any]]] = [
    *((arch, {}) for arch in ROPE_ARCHS if arch not in HYBRID_ARCHS),
    ("llama", {"rope_freqs": (1, 2, 3, 4, 5, 6, 7, 8)}),
    ("llama", {"yarn": (4.0, 4096), "n_embd": 128}),
    ("qwen2", {"yarn": (4.0, 64)}),
    ("gemma3", {"linear_scale": 4.0, "rope_freq_base": 1e6}),
]
ROTATING = [case for case in ROTATING if case[0] not in UNKNOWN]


def seqs_in_memory(llm: pypcd.Llama) -> list[int]:
    memory = llama_cpp.llama_get_memory(llm.ctx)
    n = llama_cpp.llama_n_seq_max(llm.ctx)
    return [seq for seq in range(n) if llama_cpp.llama_memory_seq_pos_max(memory, seq) >= 0]


def cells(llm: pypcd.Llama) -> bytes:
    """What the memory has of sequence 0."""
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    state = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, state, size, 0) == size
    return bytes(state)


def restore(llm: pypcd.Llama, state: bytes) -> None:
    """What cells() said, through the low-level API."""
    buffer = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
    assert llama_cpp.llama_state_seq_set_data(llm.ctx, buffer, len(state), 0)


# -- rows ------------------------------------------------------------------------------------------------------------


SHARED: dict[str, Any] = {"cache": "shared"}
SEPARATE: dict[str, Any] = {"cache": "separate"}
PAPER: dict[str, Any] = {"cache": "rerotated"}
TURNED: list[dict[str, Any]] = [
    SHARED,
    SEPARATE,
    PAPER,
    {**PAPER, "window": 20},
    {**PAPER, "alpha": 0.5, "base_ratio": 0.01},
    {**SHARED, "window": 20},
    {**SHARED, "alpha": 0.5, "base_ratio": 0.01},
    {**SEPARATE, "transition": "none", "base_ratio": 0.01},
]


@pytest.mark.parametrize("setting", TURNED, ids=str)
@pytest.mark.parametrize(("arch", "kwargs"), ROTATING, ids=["-".join([arch, *kwargs]) for arch, kwargs in ROTATING])
def test_over_rotated_rows_are_those_of_the_reference(
    arch: str, kwargs: dict[str, Any], setting: dict[str, Any], tiny: Tiny, load: Load
) -> None:
    """Two bases, M-RoPE, a part of each head, factors of the model's own, YaRN: rho multiplies what the model has."""
    path = tiny(arch, **kwargs)
    llm = load(path, setting)
    if (
        setting["cache"] == "rerotated"
        and arch.startswith("gemma")
        and not hasattr(llama_cpp, "llama_state_seq_get_data_ext")
    ):
        with pytest.raises(pypcd.UnsupportedError, match="does not say which position each cell of its cache holds"):
            llm.eval(TOKENS[:PROMPT])
        return
    follow(llm, path, TOKENS, *range(PROMPT, PROMPT + 4), moved=0.02)
    assert seqs_in_memory(llm) == [0]
    stats = llm.pcd_stats()
    assert (stats.n_tokens, stats.n_twins, stats.n_fused) == (4, 4, 0)
    assert (stats.n_separate, stats.n_caught_up) == ((4, PROMPT - 1) if setting["cache"] == "separate" else (0, 0))
    assert (stats.second_bytes > 0) == (setting["cache"] != "shared")


@pytest.mark.parametrize("n_ubatch", [64, 7])
def test_second_keys_follow_forks_and_rewinds(n_ubatch: int, tiny: Tiny, load: Load) -> None:
    """Each cell that gets another key is turned again, though the position there is the same."""
    llm, path = load(tiny("llama"), PAPER, n_seq_max=2, n_ubatch=n_ubatch), tiny("llama")
    text, other = TOKENS[:PROMPT], TOKENS[60:]
    llm.eval(text)
    engine.copy_sequence(llm, 0, 1)
    for n in range(2):
        assert engine.decode(llm, [(line[n], PROMPT + n, seq, True) for seq, line in enumerate((other, other[9:]))])
        for seq, line in enumerate((other, other[9:])):
            check_rows(llm, path, [*text, *line[: n + 1]], row=seq)
    for keep in (PROMPT + 1, 30):
        for seq in range(2):
            engine.rewind(llm, keep, seq)
        assert engine.decode(llm, [(other[20], keep, 0, False), (other[21], keep + 1, 0, True)])
        check_rows(llm, path, [*text, *other][:keep] + other[20:22])


def test_second_keys_follow_a_restored_sequence(tiny: Tiny, load: Load) -> None:
    """Through the low-level API."""
    llm = load(tiny("llama"), PAPER)
    llm.eval(TOKENS[:40])
    sequence = cells(llm)
    engine.clear(llm)
    llm.eval(TOKENS[60:100])
    restore(llm, sequence)
    llm.n_tokens = 40
    follow(llm, tiny("llama"), TOKENS, 41)


@pytest.mark.parametrize("evaluation", ["auto", "fused", "alternate"])
@pytest.mark.parametrize("arch", [arch for arch in ATTENTION_ARCHS if arch not in UNKNOWN])
def test_rows_are_those_of_the_reference(arch: str, evaluation: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny(arch), {**WINDOW, "evaluation": evaluation})
    for n in range(PROMPT, PROMPT + 5):
        follow(llm, tiny(arch), TOKENS, n)
        assert n == PROMPT or np.array_equal(native_row(llm, 0), native_row(llm)), "a step's row is 0, or -1"
    assert seqs_in_memory(llm) == [0]
    stats = llm.pcd_stats()
    assert (stats.n_tokens, stats.n_twins, stats.n_skipped) == (5, 5, 0)
    assert (stats.n_fused, stats.n_alternate) == ((0, 5) if evaluation == "alternate" else (4, 1))


@pytest.mark.parametrize(("window", "n_sink"), [(2, 4), (20, 0), (20, 4), (20, 30), (1, 0), (200, 4)])
def test_a_twin_sees_its_window_and_the_first_positions(window: int, n_sink: int, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), {"perturbation": "none", "window": window, "n_sink": n_sink})
    for n in (1, 2, 3, 19, 20, 21, 24, 25, 40):
        llm.reset()
        follow(llm, tiny("llama"), TOKENS, n, moved=0.0)


def test_a_token_of_several_sequences_stays_in_all_and_twins_of_the_batch_see_it_in_any(tiny: Tiny, load: Load) -> None:
    """A step is fused, in a batch of the engine's own; two tokens are not."""
    llm = load(tiny("llama"), {**WINDOW, "window": 6, "evaluation": "fused"}, n_seq_max=2)
    llm.eval(TOKENS[:20])
    engine.copy_sequence(llm, 0, 1)
    for entries in ([(TOKENS[20], 20, [0, 1], True)], [(TOKENS[21], 21, [0, 1], True), (TOKENS[22], 22, [1], True)]):
        with batch_of(entries) as batch:
            assert llm._ctx.stock.decode(batch) == 0
        check_rows(llm, tiny("llama"), TOKENS[: entries[-1][1] + 1])
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert [llama_cpp.llama_memory_seq_pos_max(memory, seq) for seq in range(2)] == [21, 22]
    assert llm.pcd_stats().n_fused == 1


# -- the same work as the native engine, whatever is done ------------------------------------------------------------

SETTINGS: list[Any] = [
    False,
    WINDOW,
    {**WINDOW, "evaluation": "fused"},
    {**WINDOW, "evaluation": "alternate", "relative_top": 0.3},
    {**WINDOW, "min_context": 30},
    {**WINDOW, "min_first_entropy": 8.0},
    {**WINDOW, "min_entropy": 8.0},
    {"perturbation": "none", "window": 5, "n_sink": 1, "gamma": 1},
    *TURNED,
    {**SHARED, "relative_top": 0.3, "min_context": 30},
    {**SEPARATE, "min_entropy": 8.0},
]
SETTINGS = [one and pypcd.PCDConfig(**one) for one in SETTINGS]  # whole ones, also while PCD is off
OF_BOTH = [n for n, one in enumerate(SETTINGS) if not one or one.cache != "separate"]  # engines


def deeds(settings: Sequence[int]) -> st.SearchStrategy[tuple[str, int]]:
    return st.one_of(
        st.tuples(st.just("eval"), st.integers(1, 40)),
        st.tuples(st.just("eval"), st.just(1)),
        st.tuples(st.just("rewind"), st.integers(1, 30)),
        st.tuples(st.just("set"), st.sampled_from(settings)),
        st.tuples(st.just("state"), st.just(0)),
        st.tuples(st.just("reset"), st.just(0)),
    )


@pytest.fixture(scope="module")
def pair(tiny: Tiny) -> Any:
    yield from opened(tiny, "stock", "native")


@pytest.fixture(scope="module")
def stock(tiny: Tiny) -> Any:
    yield from opened(tiny, "stock", "stock")


def opened(tiny: Tiny, *engines: str) -> Any:
    both = []
    try:
        for name in engines:
            more = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
            both.append(pypcd.Llama(tiny("llama"), engine=name, n_ctx=256, n_batch=64, n_threads=1, **more))
        yield both
    finally:
        for llm in both:
            llm.close()


def do(llm: pypcd.Llama, what: str, n: int, n_ctx: int = 256) -> None:
    if what == "eval" and llm.n_tokens + n <= n_ctx:
        llm.eval(TOKENS[llm.n_tokens % 60 :][:n])
    elif what == "rewind":
        llm.n_tokens = max(llm.n_tokens - n, 0)
    elif what == "set":
        llm.pcd = False
        llm.pcd = SETTINGS[n]
    elif what == "state":
        llm.load_state(llm.save_state())
    elif what == "reset":
        llm.reset()
    elif what == "shift" and llm.n_tokens > 20:  # as chat programs do: tokens in the middle go, and the rest moves
        memory = llama_cpp.llama_get_memory(llm.ctx)
        llama_cpp.llama_memory_seq_rm(memory, 0, 8, 8 + n)
        llama_cpp.llama_memory_seq_add(memory, 0, 8 + n, llm.n_tokens, -n)
        llm.n_tokens -= n


@beside_native
@settings(max_examples=160)
@given(todo=st.lists(deeds(OF_BOTH) | st.tuples(st.just("shift"), st.integers(1, 9)), min_size=3, max_size=12))
def test_whatever_is_done_rows_are_those_of_the_native_engine(
    todo: list[tuple[str, int]], pair: Any, tiny: Tiny
) -> None:
    limit = rounding(tiny("llama"))
    for llm in pair:
        engine.clear(llm)
        llm.pcd = False
        llm.pcd = "window:window=20"
    for what, n in todo:
        for llm in pair:
            do(llm, what, n)
        ours, theirs = pair
        config = ours.pcd
        assert config == theirs.pcd and ours.n_tokens == theirs.n_tokens
        if what != "eval" or not ours.n_tokens:
            continue
        # twins and second keys are turned once here, and twice there, by float32's angles
        local = limit * (turn(tiny("llama"), config) if config else 1)
        close(native_row(ours), native_row(theirs), contrasted(local, config.beta if config else 0.0) + limit)
        if config is None:
            continue
        mine, other = ours.pcd_logits(), theirs.pcd_logits()
        close(mine.standard, other.standard, limit)
        assert (mine.beta is None) == (other.beta is None)
        if mine.beta is not None:
            close(mine.local, other.local, local)


@settings(max_examples=60)
@given(
    todo=st.lists(deeds(range(len(SETTINGS))), min_size=3, max_size=12),
    setting=st.sampled_from([WINDOW, {**WINDOW, "evaluation": "alternate"}, SHARED, SEPARATE, PAPER]),
)
def test_whatever_was_done_rows_are_those_of_a_fresh_context(
    todo: list[tuple[str, int]], setting: Any, stock: Any, tiny: Tiny
) -> None:
    llm, fresh = stock
    engine.clear(llm)
    for what, n in todo:
        do(llm, what, n, n_ctx=255)  # and one more below
    for one in (llm, fresh):
        one.pcd = False
        one.pcd = pypcd.PCDConfig(**setting)
    llm.eval([5])
    text = llm.input_ids[: llm.n_tokens].tolist()
    engine.clear(fresh)
    fresh.eval(text)
    limit = rounding(tiny("llama"))
    close(llm.pcd_logits().standard, fresh.pcd_logits().standard, limit)
    close(llm.pcd_logits().local, fresh.pcd_logits().local, limit)
    assert seqs_in_memory(llm) == [0]


# -- plain is plain --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        False,
        {**WINDOW, "min_context": 200},
        {**WINDOW, "min_entropy": 99.0},
        {**WINDOW, "min_first_entropy": 99.0},
        {**SHARED, "min_context": 200},
        {**SEPARATE, "min_context": 200},
        {**PAPER, "min_context": 200},
    ],
)
def test_what_a_floor_leaves_plain_is_plain_to_the_bit(setting: Any, tiny: Tiny, load: Load) -> None:
    plain, llm = (load(tiny("llama"), pcd) for pcd in (False, setting))
    for tokens in (TOKENS[:PROMPT], *([token] for token in TOKENS[PROMPT : PROMPT + 5])):
        plain.eval(tokens)
        llm.eval(tokens)
        assert np.array_equal(native_row(llm), native_row(plain))
    assert llm.pcd_stats().n_twins == 0
    assert cells(llm) == cells(plain)


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("setting", [SHARED, SEPARATE, PAPER], ids=str)
def test_l_is_plain_to_the_bit_beside_an_over_rotated_twin(
    setting: dict[str, Any], flash_attn: bool, tiny: Tiny, load: Load
) -> None:
    """Where nothing is rotated by other tables, no operation is touched."""
    plain, llm = (load(tiny("llama"), pcd, f16=True, flash_attn=flash_attn) for pcd in (False, False))
    watch = _rotation.watch_of(llm)
    assert watch.rotation is None and watch.reader is None
    llm.pcd = pypcd.PCDConfig(**setting)
    assert (watch.rotation is None, watch.see is None) == (setting is SEPARATE, setting is not PAPER)
    for tokens in (TOKENS[:PROMPT], *([token] for token in TOKENS[PROMPT : PROMPT + 5])):
        plain.eval(tokens)
        llm.eval(tokens)
        got = llm.pcd_logits()
        assert np.array_equal(got.standard, native_row(plain)) and np.abs(got.local - got.standard).max() > 0.05
    llm.pcd = False
    assert watch.rotation is None and watch.see is None


# -- the callback, which a context has once an operation has to be seen --------------------------------------------------


def is_shown(llm: pypcd.Llama) -> bool:
    return bool(llm.context_params.cb_eval)


@pytest.mark.parametrize("setting", [False, True, WINDOW, SEPARATE], ids=str)
def test_without_over_rotation_there_is_no_callback(setting: Any, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), setting)
    llm.eval(TOKENS[:PROMPT])
    llm.pcd = pypcd.PCDConfig(**WINDOW)
    llm.eval(TOKENS[PROMPT : PROMPT + 1])
    assert not is_shown(llm)


@pytest.mark.parametrize("arch", [arch for arch in ("llama", "gemma3", "qwen2vl") if arch not in UNKNOWN])
@pytest.mark.parametrize("setting", [SHARED, PAPER, "attention"], ids=str)
def test_a_context_that_is_opened_again_has_the_state_of_the_former_one(
    setting: Any, arch: str, tiny: Tiny, load: Load
) -> None:
    """Texts of two sequences, what a twin saw, the numbers of threads, and who may stop an evaluation."""
    path, asked = tiny(arch), []
    llm = load(path, WINDOW, n_seq_max=2)
    callback = llama_cpp.ggml_abort_callback(lambda _: bool(asked.append(1)))
    llama_cpp.llama_set_abort_callback(llm.ctx, callback, None)
    llm.eval(TOKENS[:PROMPT])
    llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(llm.ctx), 0, 1, 0, 30)
    engine.set_threads(llm, 3, 5)
    before = cells(llm)
    if setting == "attention":
        found = engine.attention(llm, TOKENS[:PROMPT], TOKENS[PROMPT : PROMPT + 2], [1, 1])
        engine.rewind(llm, PROMPT, 0)
        fresh = load(path)
        fresh.eval(TOKENS[:PROMPT])
        again = engine.attention(fresh, TOKENS[:PROMPT], TOKENS[PROMPT : PROMPT + 2], [1, 1])
        assert found.keys() == again.keys()
        for il, sums in again.items():
            close(found[il], sums, tolerance(path, PROMPT + 2, of=sums, **shape(llm)))
    else:
        llm.pcd = pypcd.PCDConfig(**setting)
    assert is_shown(llm) and cells(llm) == before and seqs_in_memory(llm) == [0, 1]
    assert (llama_cpp.llama_n_threads(llm.ctx), llama_cpp.llama_n_threads_batch(llm.ctx)) == (3, 5)
    asked.clear()
    follow(llm, path, TOKENS, *range(PROMPT + 1, PROMPT + 4))
    assert asked
    assert engine.decode(llm, [(TOKENS[30], 30, 1, True)])
    check_rows(llm, path, TOKENS[:31], row=0)


def test_a_context_that_cannot_be_opened_again_is_as_it_was(
    tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, llm = load(tiny("llama")), load(tiny("llama"), WINDOW)
    for one in (plain, llm):
        one.eval(TOKENS[:PROMPT])
    opens = llama_cpp.llama_init_from_model
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_init_from_model", lambda model, own: None if own.cb_eval else opens(model, own))
        with pytest.raises(pypcd.UnsupportedError, match="no memory to open this context again.*smaller n_ctx"):
            llm.pcd = "paper"
    assert llm.pcd == pypcd.PCDConfig(**WINDOW) and not is_shown(llm) and cells(llm) == cells(plain)
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_state_get_data", lambda *_: 0)
        with pytest.raises(pypcd.UnsupportedError, match="does not give this context's state"):
            llm.pcd = "paper"
    follow(llm, tiny("llama"), TOKENS, PROMPT + 1)


def test_ctrl_c_meanwhile_leaves_a_context(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """And another thread may ask for its size, which it does not have for a moment."""
    llm, opens = load(tiny("llama"), WINDOW), llama_cpp.llama_init_from_model
    llm.eval(TOKENS[:PROMPT])
    seen = []

    def interrupted(model: Any, own: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        seen.append((llm.n_ctx(), llm.pooling_type()))
        return opens(model, own)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(llama_cpp, "llama_init_from_model", interrupted)
            llm.pcd = "paper"
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [(llm.n_ctx(), llama_cpp.llama_pooling_type(llm.ctx))] and llm.pcd == pypcd.PCDConfig(**WINDOW)
    llm.pcd = "paper"
    follow(llm, tiny("llama"), TOKENS, PROMPT + 1)


def test_positions_that_were_moved_wait_for_a_token(tiny: Tiny, load: Load) -> None:
    """llama.cpp turns their keys with the next batch, and a state does not say so."""
    llm, shown = load(tiny("llama"), False), load(tiny("llama"), SHARED)
    memories = [llama_cpp.llama_get_memory(one.ctx) for one in (llm, shown)]
    for one, memory in zip((llm, shown), memories):
        one.eval(TOKENS[:PROMPT])
        llama_cpp.llama_memory_seq_rm(memory, 0, 10, 20)
        llama_cpp.llama_memory_seq_add(memory, 0, 20, -1, -10)
        one.n_tokens -= 10
    with pytest.raises(pypcd.UnsupportedError, match="positions were moved.*evaluate one first"):
        llm.check_pcd("paper:cache=shared")
    for token in TOKENS[PROMPT : PROMPT + 2]:
        llm.eval([token])
        shown.eval([token])
        llm.pcd = pypcd.PCDConfig(**SHARED)
    close(llm.pcd_logits().local, shown.pcd_logits().local, tolerance(tiny("llama"), PROMPT))


@pytest.mark.parametrize("setting", [None, "paper"])
def test_a_session_reads_its_text_again(
    setting: str | None, tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy, cells of a window have another order, by which flash attention rounds: an answer would depend on those before it."""
    llm = load(tiny("llama"), False)
    session = Session(llm)
    session.start(TOKENS[:PROMPT], None)
    session.finish()
    monkeypatch.setattr(llama_cpp, "llama_state_set_data", lambda *_: pytest.fail("it is copied"))
    if setting:
        session.start(TOKENS[:PROMPT], pypcd.PCDConfig.resolve(setting))
    else:
        session.attention(TOKENS[:PROMPT], TOKENS[PROMPT : PROMPT + 5])
    assert is_shown(llm)


@pytest.mark.parametrize("name", ["llama_init_from_model", "llama_state_set_data"])
def test_a_context_that_is_lost_says_so(name: str, tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny("llama"), WINDOW)
    llm.eval(TOKENS[:PROMPT])
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, name, lambda *_: None)
        with pytest.raises(pypcd.PCDError, match="and is gone.*close the model and open it again"):
            llm.pcd = "paper"
    with pytest.raises(pypcd.PCDError, match="is gone"):
        llm.eval(TOKENS[:1])
    llm.close()


# -- the end of the context ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [{**WINDOW, "evaluation": "fused"}, {**WINDOW, "evaluation": "alternate"}, SHARED, SEPARATE, PAPER],
    ids=str,
)
def test_the_last_position_has_its_twin(setting: dict[str, Any], tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), setting)
    text = (TOKENS * 3)[:256]
    llm.eval(text[:-1])
    follow(llm, tiny("llama"), text, 256)
    stats = llm.pcd_stats()
    assert (stats.n_fallbacks > 0) == ("cell" in stats.last_fallback)
    follow(load(tiny("llama"), setting), tiny("llama"), text, 256)


# -- what it cannot do, said ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({"type_k_over": "f16"}, 'type_k_over with cache="rerotated"'),
        ({**WINDOW, "sequences": "chosen"}, 'sequences="chosen"'),
        ({"perturbation": "none", "window": 1}, "a window of 1"),
    ],
)
def test_settings_that_need_the_native_engine_are_refused(setting: Any, what: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), WINDOW)
    before = llm.pcd
    setting = pypcd.PCDConfig(**setting) if isinstance(setting, dict) else setting
    for attempt in (lambda: setattr(llm, "pcd", False) or setattr(llm, "pcd", setting), lambda: llm.check_pcd(setting)):
        with pytest.raises(pypcd.UnsupportedError, match=f"{what}.* needs (the native engine|pypcd's own libllama)"):
            attempt()
    llm.pcd = before
    with pytest.raises(pypcd.UnsupportedError, match="a sampler that contrasts needs"):
        pypcd.pcd_sampler(llm)
    with pytest.raises(ValueError, match="engine is 'stok'.*'stock'"):
        pypcd.Llama(tiny("llama"), engine="stok")
    assert llm.pcd == before
    follow(llm, tiny("llama"), TOKENS, 30)


@pytest.mark.parametrize(
    ("arch", "options", "why"),
    [
        *([] if HYBRID_ARCHS[0] in UNKNOWN else [(HYBRID_ARCHS[0], {}, "recurrent layers")]),
        ("gemma2", {"swa_full": False}, "swa_full=True"),
        ("llama", {"embedding": True}, "embeddings"),
        ("llama", {"n_seq_max": 50, "n_batch": 50}, "leaves no sequence for a twin"),
        ("llama", {"n_seq_max": 49, "n_batch": 50}, None),
    ],
)
def test_contexts_that_can_have_no_twins_are_refused(
    arch: str, options: dict[str, Any], why: str | None, tiny: Tiny, load: Load
) -> None:
    llm = load(tiny(arch), False, **options)
    if why is None:
        llm.check_pcd("window:window=20")
        return
    with pytest.raises(pypcd.UnsupportedError, match=why):
        llm.pcd = "window:window=20"
    assert llm.pcd is None


def test_texts_and_caches_whose_keys_cannot_be_turned_are_refused(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama", n_embd=256), False, type_k=llama_cpp.GGML_TYPE_Q8_0)
    with pytest.raises(pypcd.UnsupportedError, match="second keys are rotated in f16 and f32 alone.*use cache=shared"):
        llm.pcd = "paper"
    llm = load(tiny("qwen2vl"), PAPER)
    llm.eval(TOKENS[:PROMPT])
    restore(llm, cells(llm))
    with pytest.raises(
        pypcd.UnsupportedError, match="rotates the keys of pictures by three positions.*use cache=shared"
    ):
        llm.eval([5])
    llm = load(tiny("llama"), PAPER)
    llm.eval(TOKENS[:PROMPT])
    llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(llm.ctx), 0, 8, 12)
    with pytest.raises(pypcd.UnsupportedError, match="which position each cell of its cache holds.*use cache=shared"):
        llm.eval([5])


def test_an_evaluation_that_is_stopped_leaves_nothing_behind(tiny: Tiny, load: Load) -> None:
    """Ctrl-C between a token and its twin: the token goes, and the text goes on as if it had not been."""
    llm = load(tiny("llama"), {**WINDOW, "evaluation": "alternate"})
    llm.eval(TOKENS[:PROMPT])
    evaluate, calls = llm._ctx.stock._evaluate, []

    def stop(batch: Any, tokens: Any) -> int:
        calls.append(batch.n_tokens)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return evaluate(batch, tokens)

    llm._ctx.stock._evaluate = stop
    with pytest.raises(KeyboardInterrupt):
        llm.eval(TOKENS[PROMPT : PROMPT + 1])
    assert calls == [1, 1] and llm.n_tokens == PROMPT
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == PROMPT - 1 and seqs_in_memory(llm) == [0]
    llm._ctx.stock._evaluate = evaluate
    follow(llm, tiny("llama"), TOKENS, PROMPT + 1)


def test_a_second_context_is_opened_when_it_is_needed_and_closed_when_it_is_not(
    tiny: Tiny, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(tiny("llama"), SHARED)
    assert llm.pcd_stats().second_bytes == 0
    caplog.set_level("INFO", "pypcd")
    llm.pcd = SEPARATE
    (said,) = (record.message for record in caplog.records)
    taken = llm.pcd_stats().second_bytes
    assert said == f"PCD: the second context of cache=separate takes {taken / 2**20:.1f} MiB" and taken > 2**18
    with llm._pcd_set_to(None):
        assert llm.pcd_stats().second_bytes == taken, "as second keys do, it stays while PCD is off"
    llm.pcd = "window"
    assert llm.pcd_stats().second_bytes == 0
    llm.pcd = False
    llm.pcd = "paper:cache=separate:type_k_over=f16"
    llm.eval(TOKENS[:PROMPT])
    standard, local = expected(tiny("llama"), TOKENS[:PROMPT], PROMPT - 1, llm.pcd)
    close(llm.pcd_logits().standard, standard, tolerance(tiny("llama")))
    close(llm.pcd_logits().local, local, 3 * tolerance(tiny("llama"), f16=True))


def test_a_second_context_holds_no_text_that_is_gone(tiny: Tiny, load: Load) -> None:
    """What a text answers does not depend on what was asked before, and it takes as long."""
    llm = load(tiny("llama"), SEPARATE)
    caught_up = []
    for _ in range(3):
        llm.reset()
        llm.eval(TOKENS[:PROMPT])
        caught_up.append(llm.pcd_stats().n_caught_up)
    llm.n_tokens = 30
    follow(llm, tiny("llama"), TOKENS, PROMPT)
    assert caught_up == [PROMPT - 1, 2 * (PROMPT - 1), 3 * (PROMPT - 1)]
    assert llm.pcd_stats().n_caught_up == caught_up[-1], "what comes again behind its beginning is held still"


def test_settings_of_two_engines_are_not_asked_of_one() -> None:
    separate, coarse = (pypcd.PCDConfig.resolve(f"paper:{value}") for value in ("cache=separate", "type_k_over=f16"))
    if engine.choose_engine(None) == "native":
        assert engine.choose_engine(None, None, separate) == "stock" and engine.choose_engine(None, coarse) == "native"
    with pytest.raises(
        pypcd.UnsupportedError, match='cache="separate" needs the stock engine and type_k_over .* the native one'
    ):
        engine.choose_engine(None, coarse, separate)


@pytest.mark.parametrize("deed", ["shift", "state"])
def test_a_text_that_is_not_known_has_no_second_evaluation(deed: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), SEPARATE)
    llm.eval(TOKENS[:PROMPT])
    if deed == "shift":
        do(llm, "shift", 5)
    else:  # past load_state(), which tells what its tokens are
        restore(llm, cells(llm))
    n = llm.n_tokens
    with pytest.raises(pypcd.UnsupportedError, match="evaluates the text a second time, and this one has parts"):
        llm.eval([5])
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_pos_max(memory, 0) == n - 1 and llm.n_tokens == n
    llm.pcd = SHARED
    llm.eval([5])
    assert llm.pcd_logits().local is not None
    llm.pcd = SEPARATE
    llm.reset()
    follow(llm, tiny("llama"), TOKENS, PROMPT)


def test_a_ggml_of_another_layout_is_refused(tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny("llama"), False)
    rotation = _rotation.op_number(b"ROPE")
    monkeypatch.setattr(_rotation, "op_number", lambda name: rotation + 1)
    _rotation.unknown_layout.cache_clear()
    try:
        for setting in (SHARED, SEPARATE):
            with pytest.raises(pypcd.UnsupportedError, match="this ggml lays out its tensors in another way"):
                llm.pcd = pypcd.PCDConfig(**setting)
        llm.pcd = pypcd.PCDConfig(**WINDOW)
    finally:
        _rotation.unknown_layout.cache_clear()


def test_models_that_rotate_nothing_are_refused(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("bloom"), WINDOW)
    for setting in (SHARED, SEPARATE):
        llm.pcd = False
        with pytest.raises(pypcd.UnsupportedError, match="no rotary positions to over-rotate; use perturbation=none"):
            llm.pcd = pypcd.PCDConfig(**setting)


@beside_native
@pytest.mark.parametrize("setting", [SHARED, SEPARATE, PAPER], ids=str)
@pytest.mark.parametrize("file", [model["file"] for model in FILES])
def test_over_rotation_on_every_architecture_of_llama_cpp(file: str, setting: dict[str, Any], load: Load) -> None:
    """L* is the native engine's, or where that refuses, stock llama.cpp's with another base; or it is refused in words.

    PYPCD_ARCH_MODELS names the folder of models that scripts/recipes/arch_models makes."""
    if not FOLDER.is_dir():
        pytest.skip("PYPCD_ARCH_MODELS does not name the folder of models")
    text = np.random.default_rng(7).integers(1, 120, arch_checks.LENGTH).tolist()
    setting, rows = {**setting, "transition": "none"}, []
    for kind in ("native", "stock"):
        try:
            llm = load(FOLDER / file, setting, engine=kind)
            llm.eval(text[:-1])
            llm.eval(text[-1:])
            rows.append(llm.pcd_logits())
        except pypcd.UnsupportedError as error:
            rows.append(error)
    theirs, ours = rows
    if isinstance(ours, Exception):
        more = (
            ""
            if isinstance(theirs, pypcd.PCDLogits)
            else "|rotary positions|rotate nothing|keeps no keys|second keys cannot follow"
        )
        assert re.search(f"recurrent|rows of other tokens{more}", str(ours))
        return
    effect = np.abs(ours.local - ours.standard).max()
    if isinstance(theirs, pypcd.PCDLogits):
        close(ours.local, theirs.local, max(0.01 * effect + 1e-5, rounding_of(llm, text)))
    else:
        model = arch_checks.Model(FOLDER / file)
        try:
            wanted = arch_checks.ORACLES[setting["cache"]](model, text, 1e-4)
        except arch_checks.Failed as error:
            # of this one no model with another base can be opened, so nobody can say what is right
            assert file.startswith("deepseek2-ocr") and "asserts its base" in str(error) and effect > 0
            return
        close(ours.local, wanted, 0.01 * effect)


# -- llama_decode, called by others ------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [WINDOW, PAPER], ids=str)
@pytest.mark.parametrize("n_asked", [1, 40])
def test_batches_of_others_are_contrasted_too(n_asked: int, setting: dict[str, Any], tiny: Tiny, load: Load) -> None:
    """Under the same indices, also where more rows are asked for than there are twins in a batch."""
    llm = load(tiny("llama"), setting)
    batch = llama_cpp.llama_batch_init(64, 0, 1)
    try:
        batch.n_tokens = PROMPT
        for i, token in enumerate(TOKENS[:PROMPT]):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, i >= PROMPT - n_asked
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert llama_cpp.llama_decode(llm.ctx, batch) == 0
    finally:
        llama_cpp.llama_batch_free(batch)
    for k in range(1, n_asked + 1, 7):
        check_rows(llm, tiny("llama"), TOKENS[: PROMPT - k + 1], row=-k)
    assert llm.pcd_stats().n_tokens == n_asked and seqs_in_memory(llm) == [0]
    assert np.array_equal(engine.row(llm, PROMPT - 1), native_row(llm))
    for token, status in ((100000, -1), (TOKENS[PROMPT], 0)):  # one that fails is left alone
        one = (llama_cpp.llama_token * 1)(token)
        assert llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_get_one(one, 1)) == status
    check_rows(llm, tiny("llama"), TOKENS[: PROMPT + 1])


def test_sequences_that_are_twins_are_not_the_callers(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), WINDOW, n_seq_max=2)
    llm.eval(TOKENS[:PROMPT])
    assert engine.decode(llm, [(5, 0, 1, True)])
    for setting in (WINDOW, False):
        llm.pcd = setting
        if setting:
            with pytest.raises(
                pypcd.UnsupportedError, match="sequence 2 has tokens, but ids from 2 on belong to PCD's twins"
            ):
                engine.decode(llm, [(5, 0, 2, True)])
            assert seqs_in_memory(llm) == [0, 1]
        else:
            assert engine.decode(llm, [(5, 0, 2, True)])
    llm.pcd = "window:window=20"
    with pytest.raises(pypcd.UnsupportedError, match="sequence 2 has tokens"):
        llm.eval(TOKENS[PROMPT : PROMPT + 1])
    assert seqs_in_memory(llm) == [0, 1, 2]
    engine.rewind(llm, 0, 2)
    follow(llm, tiny("llama"), TOKENS, PROMPT + 1)


@pytest.mark.parametrize("setting", ["paper", "paper:cache=shared"])
@pytest.mark.parametrize("where", ["a callback", "the end of turning"])
def test_an_interrupt_ends_the_call_and_what_comes_next_is_not_over_rotated(
    setting: str, where: str, tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny("llama")
    plain = load(path, False, engine="stock")
    plain.eval(TOKENS[:30])
    llm = load(path, setting, engine="stock")
    llm.eval(TOKENS[:20])
    own = getattr(_rotation.Rotation, name := "give_table" if where == "a callback" else "turn")

    def interrupted(*args: Any) -> None:
        own(*args)
        if name == "give_table" or args[-1] is not None:
            monkeypatch.setattr(_rotation.Rotation, name, own)
            raise KeyboardInterrupt

    monkeypatch.setattr(_rotation.Rotation, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(TOKENS[20:21])
    llm.reset()
    llm.eval(TOKENS[:30])
    assert np.array_equal(llm.pcd_logits().standard, engine.row(plain))
    llm.pcd = False
    llm.reset()
    llm.eval(TOKENS[:30])
    assert np.array_equal(engine.row(llm), engine.row(plain))
