"""A sequence's own setting: what it may be, what it does to its rows, and how it follows edits of the memory.

Batches are passed to llama_decode directly; the same sequence alone in a context of its own is what rows are held to."""

from __future__ import annotations

import ctypes
from typing import Any

import c_functions
import llama_cpp
import numpy as np
import pytest
from batches import (
    CACHES,
    EVALUATIONS,
    OK,
    Context,
    Native,
    Setting,
    ask,
    check_seen,
    decode_batch,
    decode_in,
    same_rows,
    set_seq,
    text_of,
    turn_off,
    turn_on,
)
from conftest import TOKENS, close, flash, tolerance, turn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pypcd
from pypcd.engine import _bindings as _native
from pypcd.engine import _log

MANY = {"n_seq_max": 80, "n_ctx": 1024}


# --- rows ---

OWN: list[Setting | None] = [  # by turns
    {"beta": 1.0, "gamma": 5},
    None,
    {"beta": 0.5, "relative_top": 0.2},
    {"beta": 4.0, "gamma": 17, "relative_top": 0.01},
    {},
    {"gamma": 3, "beta": 5.0},
    {"min_context": 8, "beta": 1.0},  # as many tokens as a text has here
    {"min_context": 9},
    {"min_entropy": 1e-6},
    {"min_entropy": 100.0},
]
PLAIN: list[Setting | None] = [None, {"min_context": 9}, {"min_entropy": 100.0}]
VIEWS: list[Setting | None] = [
    {"window": 3, "n_sink": 1},
    {"window": 2, "n_sink": 0, "beta": 1.0},
    {"perturbation": "none", "window": 2, "n_sink": 1},
    {"perturbation": "none", "window": 4, "n_sink": 0, "gamma": 9},
]


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize(
    ("arch", "params", "cache"),
    [
        *(("llama", {}, cache) for cache in CACHES),
        *(("llama", flash(True), cache) for cache in CACHES),
        *((arch, {}, "rerotated") for arch in ("gemma3", "smollm3", "deepseek2", "hunyuan-dense")),
    ],
    ids=str,
)
def test_sequences_with_settings_of_their_own_have_the_rows_they_have_alone(
    arch: str, params: dict[str, Any], cache: str, evaluation: str, native: Native
) -> None:
    """Their cells lie between those of others; 80 rows are more than the 64 twins of a part of a batch. Some twins are turned,
    some see a window alone; smollm3 does not rotate in all layers, deepseek2's values are a part of its keys."""
    n = 80
    base: Setting = {"cache": cache, "evaluation": evaluation}
    together, stock = (native(arch, pcd, **MANY, **params) for pcd in (base, None))
    limit = together.limit
    if params:  # either may be as far from the exact rows as this
        limit = 2 * tolerance(together.path, flash_attn=True) * turn(together.path, pypcd.PCDConfig())
    kinds = [*VIEWS, *OWN]
    own = [kinds[seq % len(kinds)] for seq in range(n)]
    for seq, setting in enumerate(own):
        assert set_seq(together, seq, None if setting is None else {**base, **setting}) == OK
    texts = [text_of(seq, 8) for seq in range(n)]
    prompt = [(texts[seq][p], p, [seq], False) for p in range(7) for seq in range(n)]
    steps = [(texts[seq][7], 7, [seq], True) for seq in range(n)]
    for context in (together, stock):
        for start in range(0, len(prompt), 200):
            assert decode_batch(context, prompt[start : start + 200]) == 0
        assert decode_batch(context, steps) == 0
    alone = native(arch, base, **params)
    for seq, setting in enumerate(own):
        if setting in PLAIN:
            assert together.is_plain(seq) and (setting is not None or together.row(seq) is None)
            close(together.seen(seq), stock.seen(seq), limit)
            continue
        turn_on(alone, {**base, **setting})
        llama_cpp.llama_memory_clear(alone.memory, True)
        decode_in([alone], texts[seq][:7], out=[])
        decode_in([alone], texts[seq][7:])
        if together.row(seq, _native.ROW_LOCAL) is None:  # a single token is plausible
            assert evaluation == "alternate" and "relative_top" in setting
            continue
        same_rows(together, alone.rows(), seq, limit=limit)
        check_seen(together, seq, setting)


def test_only_chosen_sequences_have_pcd_where_the_context_says_so(native: Native) -> None:
    base = {"sequences": "chosen"}
    context, stock = native("llama", base, n_seq_max=3), native("llama", n_seq_max=3)
    assert set_seq(context, 1, {"gamma": 5}) == OK and set_seq(context, 2, None) == OK
    batch = [(t, p, [s], p == 9) for s in range(3) for p, t in enumerate(text_of(s, 10))]
    assert decode_batch(context, batch) == decode_batch(stock, batch) == 0
    for i, has_row in ((9, False), (19, True), (29, False)):
        assert (context.row(i) is not None) == has_row
        if not has_row:
            close(context.seen(i), stock.seen(i), context.limit)
    check_seen(context, 19, {"gamma": 5})
    assert context.stats.n_twins == 1


# --- what a sequence may have ---


NONE: Setting = {"perturbation": "none", "window": 8}


@pytest.mark.parametrize(
    ("base", "own", "message"),
    [
        ({}, {"cache": "shared"}, 'cache is "shared", the context\'s is "rerotated"'),
        ({}, {"evaluation": "alternate"}, 'evaluation is "alternate", the context\'s is "auto"'),
        ({}, {"alpha": 0.5}, "alpha is 0.5, the context's is 0.2"),
        ({}, {"transition": "none"}, 'transition is "none", the context\'s is "exponential"'),
        ({}, {"type_k_over": "f16"}, 'type_k_over is "f16", the context\'s is none'),
        (NONE, {"window": 8}, 'perturbation is "over-rotation", the context\'s is "none"'),
    ],
    ids=str,
)
def test_what_only_the_context_can_change_is_refused_before_and_after(
    base: Setting, own: Setting, message: str, native: Native
) -> None:
    after = native("llama", base, n_seq_max=2)
    assert set_seq(after, 1, {**base, "beta": 1.0}) == OK
    status, text = set_seq(after, 1, own)
    assert status == _native.INVALID and text.startswith(f"sequence 1: {message}"), text

    before = native("llama", n_seq_max=2)
    assert set_seq(before, 1, own) == OK
    for call in (_native.pcd_check, _native.pcd_set):
        status, text = ask(before, base, call)
        assert status == _native.INVALID and text.startswith(f"sequence 1: {message}"), text
    decode_in([before], TOKENS[:5])
    assert before.row() is None, "PCD stays off"
    c_functions.pcd_unset_seq(before.ctx, 1)
    turn_on(before, base)


@pytest.mark.parametrize(
    ("seq", "own", "message"),
    [
        (192, {}, "seq_id is 192, allowed: 0 to 191"),
        (0, {"gamma": 0}, "gamma is 0, allowed: at least 1"),
        (0, {"perturbation": 1}, 'perturbation "none" without a window'),
        (0, {"sequences": 2}, "sequences is 2, allowed: 0 (all), 1 (chosen)"),
        (0, {"min_context": -1}, "min_context is -1, allowed: at least 0"),
        (0, {"min_first_entropy": 101.0}, "min_first_entropy is 101, allowed: 0 to 100"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_on", [False, True], ids=["off", "on"])
def test_a_sequence_or_a_value_that_cannot_be_is_refused_at_once(
    is_on: bool, seq: int, own: Setting, message: str, native: Native
) -> None:
    """A value by the context, too."""
    context, error = native("llama", {} if is_on else None), ctypes.create_string_buffer(500)
    params = c_functions.pcd_default_params()
    for name, value in own.items():
        setattr(params, name, value)
    of_the_context = [(_native.pcd_set,), (_native.pcd_check,)] if own else []
    for call, *of in [(c_functions.pcd_set_seq, seq), *of_the_context]:
        assert call(context.ctx, *of, ctypes.byref(params), error, 500) == _native.INVALID
        assert message in error.value.decode()


def test_what_a_sequences_twins_do_not_use_may_differ(native: Native) -> None:
    """Such as alpha beside perturbation="none": presets need not be written anew for each context."""
    for base in ({"alpha": 0.5}, {"cache": "shared"}, {"base_ratio": 0.1}):
        context = native("llama", base)
        assert set_seq(context, 0, {"perturbation": "none", "window": 64}) == OK
    assert set_seq(native("llama", {**NONE, "type_k_over": "f16"}), 0, {**NONE, "alpha": 1.0}) == OK


def test_a_later_change_of_the_context_holds_for_its_sequences_but_for_what_is_theirs(native: Native) -> None:
    context, other = native("llama", {}, n_seq_max=2), native("llama", {"alpha": 0.7})
    assert set_seq(context, 0, {"gamma": 5}) == OK
    turn_on(context, {"alpha": 0.7, "gamma": 9})
    decode_in((context, other), TOKENS[:20])
    same_rows(context, other)
    check_seen(context, -1, {"gamma": 5})
    turn_off(context)
    turn_on(context, {"gamma": 9})
    assert [plausible(context, seq) for seq in range(2)] == [5, 9]
    # without a rotation a twin without a window is its token: the sequence's setting cannot be any longer
    status, text = ask(context, {"perturbation": "none", "window": 8})
    assert status == _native.INVALID and text.startswith('sequence 0: perturbation "none" without a window'), text
    assert [plausible(context, seq) for seq in range(2)] == [5, 9]


# --- edits of the memory ---


def plausible(context: Context, seq: int) -> int | None:
    """Of how many tokens the next token of a sequence can be; None: PCD is off for it."""
    decode_in([context], [TOKENS[5]], seq=seq)
    row = context.row(-1, _native.ROW_CONTRASTED)
    return None if row is None else int(np.isfinite(row).sum())


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])  # one cache; two; one beside recurrent layers
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_settings_follow_any_order_of_edits(arch: str, data: st.DataObject, native: Native) -> None:
    """Against a dictionary."""
    many, is_recurrent = native(arch, {}, n_seq_max=4), arch == "lfm2"
    memory = many.memory
    own: dict[int, int | None] = {}
    partial = [] if is_recurrent else ["cp-part", "rewind"]
    edits = st.sampled_from(["set", "off", "unset", "cp", "rm", "rm-all", "keep", "clear", "pcd", *partial])
    sequences = st.integers(0, 3)
    for _ in range(data.draw(st.integers(1, 12))):
        edit, a, b = data.draw(edits), data.draw(sequences), data.draw(sequences)
        if edit == "set":
            own[a] = data.draw(st.integers(2, 9))
            assert set_seq(many, a, {"gamma": own[a]}) == OK
        elif edit == "off":
            own[a] = None
            assert set_seq(many, a, None) == OK
        elif edit == "unset":
            c_functions.pcd_unset_seq(many.ctx, a)
            own.pop(a, None)
        elif edit == "cp" and a != b:
            assert llama_cpp.llama_memory_seq_rm(memory, b, 0, -1)
            llama_cpp.llama_memory_seq_cp(memory, a, b, -1, -1)
            own.pop(b, None)
            if a in own:
                own[b] = own[a]
        elif edit == "cp-part" and a != b:
            assert llama_cpp.llama_memory_seq_rm(memory, b, 0, -1)
            llama_cpp.llama_memory_seq_cp(memory, a, b, 0, 2)
        elif edit == "rm":
            assert llama_cpp.llama_memory_seq_rm(memory, a, -1, -1)
            own.pop(a, None)
        elif edit == "rm-all":
            removed = llama_cpp.llama_memory_seq_rm(memory, -1, -1, -1)
            assert removed != is_recurrent  # such memory cannot remove all sequences by one call
            own = {} if removed else own
        elif edit == "rewind":
            assert llama_cpp.llama_memory_seq_rm(memory, a, min(1, many.span(a)[1] + 1), -1)
        elif edit == "keep":
            llama_cpp.llama_memory_seq_keep(memory, a)
            own = {seq: value for seq, value in own.items() if seq == a}
        elif edit == "clear":
            llama_cpp.llama_memory_clear(memory, True)
            own.clear()
        elif edit == "pcd":  # off and on again
            turn_off(many)
            turn_on(many, {})
        assert [plausible(many, seq) for seq in range(4)] == [own.get(seq, 30) for seq in range(4)]


# --- indices of rows ---


@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_an_index_of_a_row_means_what_llamas_means(evaluation: str, native: Native) -> None:
    """Negative ones count back over the outputs, also those of sequences that PCD is off for."""
    context = native("llama", {"evaluation": evaluation}, n_seq_max=3)
    assert set_seq(context, 0, None) == set_seq(context, 2, None) == OK
    batch = [(t, p, [s], p in (4, 9)) for s in range(3) for p, t in enumerate(text_of(s, 10))]
    assert decode_batch(context, batch) == 0
    outputs = [i for i, entry in enumerate(batch) if entry[3]]
    for back, i in enumerate(reversed(outputs), 1):
        rows = [_native.pcd_get_logits_ith(context.ctx, index, 0) for index in (i, -back)]
        assert [bool(row) for row in rows] == [batch[i][2] == [1]] * 2
        if rows[0]:
            assert ctypes.addressof(rows[0].contents) == ctypes.addressof(rows[1].contents)
            check_seen(context, -back, {})
        assert np.array_equal(context.seen(-back), context.seen(i))
    block = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context.ctx), shape=(len(outputs), context.n_vocab))
    assert np.array_equal(block, [context.seen(i) for i in outputs])
    for i in (-len(outputs) - 1, 0, 5, 11, len(batch), 10**6, -(10**6)):
        assert not _native.pcd_get_logits_ith(context.ctx, i, 0), i


# --- backend samplers ---


@pytest.fixture
def attach() -> Any:
    """attach(context, seq): give a sequence a sampler chain that a backend can run."""
    attached = []

    def make(context: Context, seq: int) -> None:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        attached.append((context, seq, chain))
        assert llama_cpp.llama_set_sampler(context.ctx, seq, chain)

    yield make
    for context, seq, chain in attached:
        llama_cpp.llama_set_sampler(context.ctx, seq, None)
        llama_cpp.llama_sampler_free(chain)


HAS_ONE = "sequence 1 has a backend sampler, which bypasses the logits PCD works on; turn PCD off for this sequence"


@pytest.mark.parametrize("base", [{}, {"evaluation": "alternate"}], ids=str)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_sequence_with_pcd_goes_beside_one_with_a_backend_sampler(
    arch: str, base: Setting, native: Native, attach: Any
) -> None:
    context, stock, alone = native(arch, base, n_seq_max=2), native(arch, n_seq_max=2), native(arch, base)
    texts = [text_of(s, 12) for s in range(2)]
    decode_in([alone], texts[0])
    assert set_seq(context, 1, None) == OK
    for each in (context, stock):
        attach(each, 1)
        batch = [(t, p, [s], p == 11) for s in (1, 0) for p, t in enumerate(texts[s])]
        assert decode_batch(each, batch) == 0
    sampled = [llama_cpp.llama_get_sampled_token_ith(each.ctx, 11) for each in (context, stock)]
    assert sampled[0] == sampled[1] >= 0
    assert llama_cpp.llama_get_sampled_token_ith(context.ctx, 23) == llama_cpp.LLAMA_TOKEN_NULL
    same_rows(context, alone.rows(), 23)
    check_seen(context, 23, {})


def test_only_a_sequence_that_has_both_is_refused(native: Native, attach: Any) -> None:
    context = native("llama", {}, n_seq_max=2)
    attach(context, 1)
    decode_in([context], TOKENS[:9])  # of sequence 0
    check_seen(context, -1, {})
    decode_in([context], TOKENS[:8], out=[], seq=1)  # no row is asked for
    _log.clear_errors()
    assert context.decode(TOKENS[9:10], seq=1) == -1
    assert HAS_ONE in _log.last_errors() and context.span(1) == (0, 7)
    status, text = set_seq(context, 1, {"gamma": 5})
    assert status == _native.UNSUPPORTED and text.startswith(HAS_ONE)
    status, text = ask(context, {"beta": 1})
    assert status == _native.UNSUPPORTED and text.startswith(HAS_ONE)
    turn_on(context, {"sequences": "chosen"})
    assert set_seq(context, 1, None) == OK and ask(context, {}) == OK
    decode_in([context], TOKENS[9:10], seq=1)
    llama_cpp.llama_set_sampler(context.ctx, 1, None)
    assert set_seq(context, 1, {"gamma": 5}) == OK
    assert plausible(context, 1) == 5
