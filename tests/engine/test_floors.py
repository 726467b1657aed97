"""Floors: plain decoding, and no twin, below min_context, min_entropy or min_first_entropy; the contrast as ever elsewhere.

Plain rows are held to the library with PCD off, to the bit if a batch has no twin; contrasted ones to the reference,
entropies to float64."""

from __future__ import annotations

import ctypes
import itertools
import math
from pathlib import Path
from typing import Any

import c_functions
import llama_cpp
import numpy as np
import pytest
from batches import CACHES, EVALUATIONS, OK, Native, Setting, check_seen, decode_batch, read, set_seq, turn_off, turn_on
from conftest import TOKENS, Load, Tiny, check_rows, close, follow, native_row, rounding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import bits

import pypcd
from pypcd import engine
from pypcd.engine import _bindings as _native
from pypcd.settings.formula import contrast, entropy

WAYS = [*EVALUATIONS, "auto"]
FLOOR = 24  # of min_context
N = 20  # tokens of a prompt
EXACT = 1e-5  # bits: cpp/formulas/entropy.cpp computes to about 1e-6 of log2(n_vocab), and n_vocab is below 2^10 here


def check_plain(llm: pypcd.Llama, wanted: np.ndarray, i: int = -1) -> None:
    """Row i is L, to the bit, and says so."""
    standard, over, contrasted = (_native.pcd_get_logits_ith(llm.ctx, i, which) for which in range(3))
    rows = [native_row(llm, i), *(read(row, len(wanted)) for row in (standard, contrasted))]
    assert np.array_equal(rows, [wanted] * 3) and not over
    assert math.isnan(_native.pcd_get_strength_ith(llm.ctx, i))


def eval_to(end: int, *models: pypcd.Llama) -> None:
    for llm in models:
        llm.eval(TOKENS[llm.n_tokens : end])


# -- min_context -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize(("arch", "cache"), list(itertools.product(("llama", "gemma3", "lfm2"), CACHES)))
def test_rows_are_plain_to_the_bit_before_and_the_references_after(
    arch: str, cache: str, evaluation: str, tiny: Tiny, load: Load
) -> None:
    """A token's position, counted from 1, is what counts: that of the row at FLOOR - 1 is enough."""
    path = tiny(arch)
    llm, stock = load(path, {"cache": cache, "evaluation": evaluation, "min_context": FLOOR}), load(path, False)
    for end in range(10, FLOOR):
        eval_to(end, llm, stock)
        check_plain(llm, native_row(stock))
        rows = llm.pcd_logits()
        assert rows.local is None and rows.beta is None
    stats = llm.pcd_stats()
    assert stats.n_twins == stats.n_fallbacks == 0
    assert stats.n_tokens == stats.n_skipped == FLOOR - 10
    follow(llm, path, TOKENS, FLOOR, FLOOR + 1, FLOOR + 8)
    assert llm.pcd_stats().n_twins == 3 and llm.pcd_stats().n_skipped == FLOOR - 10


@pytest.mark.parametrize("evaluation", EVALUATIONS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_that_crosses_it(cache: str, evaluation: str, tiny: Tiny, load: Load) -> None:
    path, setting = tiny("llama"), {"cache": cache, "evaluation": evaluation, "min_context": FLOOR}
    for n_batch in (64, 16):
        llm, stock = (load(path, pcd, logits_all=True, n_batch=n_batch) for pcd in (setting, False))
        eval_to(40, llm, stock)
        for i in range(FLOOR - 1 if n_batch == 64 else 32, 40):  # of the last batch
            check_rows(llm, path, TOKENS[:40], i - 40, i)
        if n_batch == 64:
            for i in range(FLOOR - 1):
                check_plain(llm, native_row(llm, i), i)
        close(np.array(llm.scores)[: FLOOR - 1], np.array(stock.scores)[: FLOOR - 1], rounding(path))
        assert llm.pcd_stats().n_skipped == FLOOR - 1 and llm.pcd_stats().n_tokens == 40


@pytest.mark.parametrize("cache", CACHES)
def test_a_rewind_goes_back_below_it_and_so_does_a_state(cache: str, tiny: Tiny, load: Load) -> None:
    path, setting = tiny("llama"), {"cache": cache, "min_context": FLOOR}
    llm, other, stock = load(path, setting), load(path, setting), load(path, False)
    follow(llm, path, TOKENS, 30)
    engine.rewind(llm, 0)
    llm.n_tokens = 0
    eval_to(20, llm, stock)
    assert np.array_equal(native_row(llm), native_row(stock))
    other.load_state(llm.save_state())
    follow(llm, path, TOKENS, 40)
    eval_to(22, other)
    check_plain(other, native_row(other))
    follow(other, path, TOKENS, 30)


# -- min_entropy -------------------------------------------------------------------------------------------------------


def c_entropy(row: Any) -> float:
    row = np.ascontiguousarray(row, np.float32)
    return c_functions.pcd_entropy(row.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), len(row))


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ([0.0] * 8, 3.0),
        ([5.0] * 1024, 10.0),
        ([0.0], 0.0),
        ([100.0, 0.0, 0.0], 0.0),
        (np.log([0.5, 0.25, 0.25]), 1.5),
        ([1.0, 1.0, -np.inf, np.nan, -3e38], 1.0),  # what is no logit does not count
        ([-np.inf, np.nan], 0.0),
        ([0.0, 0.0] + [-9e29] * 1000, 1.0),  # hardly a logit
    ],
)
def test_entropies_worked_by_hand(row: Any, wanted: float) -> None:
    assert entropy(row) == pytest.approx(wanted, abs=1e-9)
    assert c_entropy(row) == pytest.approx(wanted, abs=EXACT)


@given(st.integers(0, 2**32 - 1), st.integers(1, 900), st.floats(0, 30), st.floats(-100, 100))
def test_entropies_of_random_rows(seed: int, n: int, spread: float, constant: float) -> None:
    """Between 0 and log2(n), the same for a row moved by a constant."""
    row = np.random.default_rng(seed).normal(0, spread, n).astype(np.float32)
    assert entropy(row) == pytest.approx(bits(row), abs=1e-9)
    assert c_entropy(row) == pytest.approx(bits(row), abs=EXACT)
    assert 0.0 <= c_entropy(row) <= math.log2(n) + EXACT
    rounding = 2 * float(np.abs(row).max() + abs(constant)) * 2**-23 * 10  # of the row that is moved, in bits
    assert c_entropy(row + np.float32(constant)) == pytest.approx(bits(row), abs=EXACT + rounding)


def between(values: list[float]) -> float:
    """A number that about half of the values are below of, and none is near."""
    ordered = sorted(values)
    i = max(range(len(ordered) // 4, 3 * len(ordered) // 4), key=lambda i: ordered[i + 1] - ordered[i])
    assert ordered[i + 1] - ordered[i] > 1e-3
    return (ordered[i] + ordered[i + 1]) / 2


@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_rows_are_plain_if_their_entropy_is_low_and_the_references_if_not(
    cache: str, evaluation: str, tiny: Tiny, load: Load
) -> None:
    path, n = tiny("llama"), 20
    stock, rows = load(path, False), []
    for end in range(20, 20 + n):
        eval_to(end, stock)
        rows.append(native_row(stock))
    least = between([bits(row) for row in rows])
    llm = load(path, {"cache": cache, "evaluation": evaluation, "min_entropy": least})
    n_plain = 0
    for end, row in zip(range(20, 20 + n), rows):
        eval_to(end, llm)
        if bits(row) < least:
            n_plain += 1
            got = llm.pcd_logits()
            assert got.beta is None and np.array_equal(got.contrasted, got.standard)
            assert np.array_equal(native_row(llm), got.standard)
            close(native_row(llm), row, rounding(path))
            if evaluation == "alternate":
                assert got.local is None and np.array_equal(native_row(llm), row)
        else:
            check_rows(llm, path, TOKENS[:end])
    assert 0 < n_plain < n
    stats = llm.pcd_stats()
    if evaluation == "alternate":
        assert (stats.n_twins, stats.n_skipped) == (n - n_plain, n_plain)
    if evaluation == "fused":
        assert stats.n_twins == n


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_rows_of_one_batch_are_judged_one_by_one(cache: str, evaluation: str, combine: bool, native: Native) -> None:
    """As guesses of a draft model are. With combine = false all of them read plain, and the contrast is asked for."""
    stock, n = native("llama"), 20
    entries = [(TOKENS[p], p, [0], p >= 10) for p in range(10 + n)]
    assert decode_batch(stock, entries) == 0
    plain = [stock.seen(10 + i) for i in range(n)]
    least = between([bits(row) for row in plain])
    setting: Setting = {"cache": cache, "evaluation": evaluation, "min_entropy": least}
    context = native("llama", setting)
    assert set_seq(context, 0, {**setting, "combine": combine}) == OK
    assert decode_batch(context, entries) == 0
    for i, row in enumerate(plain, 10):
        contrasted = context.row(i, _native.ROW_CONTRASTED)
        assert contrasted is not None
        sure = bits(row) < least
        if sure:
            assert context.is_plain(i)
            assert evaluation != "alternate" or context.row(i, _native.ROW_LOCAL) is None
            close(contrasted, row, context.limit)
        else:
            assert _native.pcd_get_strength_ith(context.ctx, i) == 2.5 and np.isfinite(contrasted).sum() == 30
        if sure or not combine:
            close(context.seen(i), row, context.limit)
        else:
            check_seen(context, i, {})


@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_the_strength_of_a_contrast_can_be_read(evaluation: str, tiny: Tiny, load: Load) -> None:
    for setting, wanted in (({"beta": 1.5}, 1.5), ({"gamma": 1}, None), ({"relative_top": 1.0}, None)):
        llm = load(tiny("llama"), {**setting, "evaluation": evaluation})
        llm.eval(TOKENS[:10])
        assert llm.pcd_logits().beta == wanted
    assert np.isnan(_native.pcd_get_strength_ith(llm.ctx, 77))
    llm.pcd = False
    llm.reset()
    llm.eval(TOKENS[:10])
    assert np.isnan(_native.pcd_get_strength_ith(llm.ctx, -1))


@given(st.integers(0, 2**32 - 1), st.floats(0, 8))
def test_the_formula_in_numpy_leaves_a_row_of_low_entropy_plain(seed: int, least: float) -> None:
    random = np.random.default_rng(seed)
    row, other = random.normal(0, 3, 200), random.normal(0, 3, 200)
    fields: dict[str, Any] = {"beta": 1.5, "gamma": 20}
    got, always = contrast(row, other, min_entropy=least, **fields), contrast(row, other, **fields)
    assert np.array_equal(got, row if bits(row) < least else always)


# -- min_first_entropy: the first token's row decides for the answer -----------------------------------------------------

Unlike = tuple[list[int], list[int], float]


def entropy_after(load: Load, path: Path, tokens: list[int]) -> float:
    stock = load(path, False)
    stock.eval(tokens)
    return bits(native_row(stock))


@pytest.fixture
def unlike(tiny: Tiny, load: Load) -> Unlike:
    """Two prompts, a number of bits that the first row of the one is below of and that of the other above, and no row near."""
    found = sorted((entropy_after(load, tiny("llama"), TOKENS[i : i + N]), i) for i in range(0, 80, 5))
    (low, i), (high, j) = found[0], found[-1]
    assert high - low > 1e-3
    return list(TOKENS[i : i + N]), list(TOKENS[j : j + N]), (low + high) / 2


def answer_to(llm: pypcd.Llama, prompt: list[int], **kwargs: Any) -> list[int]:
    return list(itertools.islice(llm.generate(prompt, temp=0.0, **kwargs), 12))


@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_the_first_token_decides_for_the_whole_answer(
    cache: str, evaluation: str, unlike: Unlike, tiny: Tiny, load: Load
) -> None:
    sure, unsure, least = unlike
    path, answer = tiny("llama"), list(TOKENS[100:104])
    llm, stock = load(path, {"cache": cache, "evaluation": evaluation, "min_first_entropy": least}), load(path, False)
    for prompt in (sure, unsure, sure):
        before = llm.pcd_stats().n_twins
        for other in (llm, stock):
            other.reset()
            other.eval(prompt)
        for i in range(len(answer) + 1):
            if prompt is sure:
                assert llm.pcd_stats().n_twins == before + (evaluation != "alternate"), "of the first token alone"
                close(native_row(llm), native_row(stock), rounding(path))
                got = llm.pcd_logits()
                assert got.beta is None and np.array_equal(got.contrasted, got.standard)
                assert (got.local is None) == (i > 0 or evaluation == "alternate")
            else:
                check_rows(llm, path, [*prompt, *answer[:i]])
            for other in (llm, stock):
                other.eval(answer[i : i + 1])


@pytest.mark.parametrize("cache", CACHES)
def test_a_plain_answer_takes_no_twins(cache: str, unlike: Unlike, tiny: Tiny, load: Load) -> None:
    """Not even while cells are rows for both: only the first token's is evaluated, and with alternate none."""
    for evaluation, n_twins in (("fused", 1), ("alternate", 0)):
        llm = load(tiny("llama"), {"cache": cache, "evaluation": evaluation, "min_first_entropy": 100.0})
        llm.eval(unlike[0])
        before = llm.pcd_stats()
        for token in TOKENS[:10]:
            llm.eval([token])
        after = llm.pcd_stats()
        assert after.n_twins == before.n_twins and after.n_skipped == before.n_skipped + 10
        assert before.n_twins == n_twins


def test_what_is_decoded_does_not_depend_on_how_it_is_asked_for(unlike: Unlike, tiny: Tiny, load: Load) -> None:
    """A prompt whose rows are all asked for, a long prompt in parts, a stream, a second answer to the same prompt."""
    sure, unsure, least = unlike
    path, setting = tiny("llama"), {"min_first_entropy": least, "evaluation": "fused"}
    for prompt in (sure, unsure):
        wanted = answer_to(load(path, False if prompt is sure else {"evaluation": "fused"}), prompt)
        for kwargs in ({}, {"logits_all": True}, {"n_batch": 8}):
            llm = load(path, setting, **kwargs)
            for _ in range(2):  # the second time only the prompt's last token is evaluated
                assert answer_to(llm, prompt) == wanted
        assert answer_to(load(path, False), prompt, pcd=pypcd.PCDConfig(**setting)) == wanted


@pytest.mark.parametrize("engine_name", ["native", "stock"])
def test_a_prompt_that_is_the_beginning_of_the_last_answer_has_an_answer_of_its_own(
    engine_name: str, tiny: Tiny, load: Load
) -> None:
    """Only its last token is evaluated, where it would be the next one of the answer before."""
    path, stock = tiny("llama"), load(tiny("llama"), False)
    found = []
    for i in range(0, 80, 5):
        short = list(TOKENS[i : i + N])
        long = [*short, next(iter(stock.generate(short, temp=0.0)))]
        found.append((*(entropy_after(load, path, prompt) for prompt in (short, long)), short, long))
    for sign in (1, -1):  # a sure answer goes before an unsure one, and the other way round
        low, high, short, long = max(found, key=lambda f: sign * (f[1] - f[0]))
        assert sign * (high - low) > 1e-3
        for kwargs in ({}, {"logits_all": True}):
            setting = {"min_first_entropy": (low + high) / 2, "evaluation": "fused", "gamma": 1000}
            answers = []
            for prompts in ([long], [short, long]):
                llm = load(path, setting, engine=engine_name, **kwargs)
                for prompt in prompts:
                    steps = zip(llm.generate(prompt, temp=0.0), range(5))
                    next(steps)
                    answers.append(llm.pcd_logits().beta)
                    if prompt is short:  # its first token is followed by another, so that it is in the cache
                        llm.eval(long[-1:])
            assert answers[0] == answers[2] and (answers[0] is None) == (sign < 0)


def test_a_saved_state_does_not_have_the_last_answers_entropy(unlike: Unlike, tiny: Tiny, load: Load) -> None:
    for a, b in (unlike[:2], unlike[1::-1]):
        llm = load(tiny("llama"), {"min_first_entropy": unlike[2], "evaluation": "fused"})
        wanted = answer_to(llm, a)
        state = llm.save_state()
        answer_to(llm, b[2:])
        llm.load_state(state)
        llm.n_tokens = N - 1  # as generate() does, where it evaluates a cached prompt's last token alone
        llm.eval(a[-1:])
        assert llm.pcd_logits().local is not None  # evaluated as the first one of an answer
        assert answer_to(llm, a) == wanted


def test_an_answer_before_min_context_stays_plain_to_its_end(tiny: Tiny, load: Load) -> None:
    setting = {"min_first_entropy": 1e-9, "min_context": N + 3}
    llm, stock = load(tiny("llama"), setting), load(tiny("llama"), False)
    for end in (N, *range(N + 1, N + 10)):
        eval_to(end, llm, stock)
        check_plain(llm, native_row(stock))
    follow(llm, tiny("llama"), TOKENS, N + 14)  # text: what follows is another answer


SEQ = st.integers(0, 2)
EDITS = st.one_of(
    st.tuples(st.just("prompt"), st.lists(SEQ, min_size=1, max_size=3, unique=True), st.booleans()),
    st.tuples(st.just("step"), st.lists(SEQ, min_size=1, max_size=3, unique=True)),
    st.tuples(st.just("draft"), SEQ, st.integers(0, 2)),
    st.tuples(st.sampled_from(["copy", "other"]), SEQ, SEQ),
    st.tuples(
        st.just("shift"), SEQ, st.sampled_from([5, 10, N - 1, N, N + 2])
    ),  # the last ones take the first token out
    st.tuples(st.just("anew"), SEQ, st.booleans()),
    st.tuples(st.sampled_from(["keep", "fail"]), SEQ),
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(EDITS, min_size=8, max_size=25))
def test_an_answer_goes_on_as_it_began_whatever_is_done_to_the_memory(
    edits: list[Any], unlike: Unlike, native: Native
) -> None:
    """Against a dictionary: of each sequence, whether its answer is plain, and its number of tokens."""
    sure, unsure, least = unlike
    setting = {"min_first_entropy": least}
    context = native("llama", setting, n_seq_max=3, n_ctx=1024)
    memory = context.memory
    plain: dict[int, bool] = {}
    length: dict[int, int] = {}
    moved: set[int] = set()  # shifted, or sharing cells that would be

    def read(*entries: tuple[int, int, list[int], bool]) -> None:
        assert decode_batch(context, entries) == 0

    for kind, seq, *more in [("prompt", [0, 1], True), ("prompt", [2], False), *edits, ("step", [0, 1, 2])]:
        if kind == "prompt":
            prompt = sure if more[0] else unsure
            for each in seq:
                llama_cpp.llama_memory_seq_rm(memory, each, -1, -1)
                plain[each], length[each] = more[0], N
                (moved.add if len(seq) > 1 else moved.discard)(each)
            read(*((token, p, seq, p == N - 1) for p, token in enumerate(prompt)))
            assert context.is_plain(N - 1) == more[0]
        elif kind == "step":
            known = [each for each in seq if each in plain]
            if known:
                read(*((TOKENS[(length[each] + 40 * each) % 120], length[each], [each], True) for each in known))
            assert [context.is_plain(i) for i in range(len(known))] == [plain[each] for each in known]
            length.update({each: length[each] + 1 for each in known})
        elif seq not in plain:
            continue
        elif kind == "draft":  # of two drafted tokens, so many were right
            read(*((TOKENS[length[seq] % 100 + i], length[seq] + i, [seq], True) for i in range(3)))
            assert [context.is_plain(i) for i in range(3)] == [plain[seq]] * 3
            length[seq] += 1 + more[0]
            llama_cpp.llama_memory_seq_rm(memory, seq, length[seq], -1)
        elif kind == "copy" and more[0] != seq:
            llama_cpp.llama_memory_seq_rm(memory, more[0], -1, -1)
            llama_cpp.llama_memory_seq_cp(memory, seq, more[0], -1, -1)
            plain[more[0]], length[more[0]] = plain[seq], length[seq]
            moved |= {seq, more[0]}
        elif kind == "other" and more[0] != seq and more[0] in plain:  # with PCD off, which ends its own answer
            turn_off(context)
            read((TOKENS[9], length.pop(more[0]), [more[0]], True))
            turn_on(context, setting)
            del plain[more[0]]
        elif kind == "shift" and seq not in moved and length[seq] > 4 + more[0]:  # as servers do in a full context
            llama_cpp.llama_memory_seq_rm(memory, seq, 2, 2 + more[0])
            llama_cpp.llama_memory_seq_add(memory, seq, 2 + more[0], -1, -more[0])
            length[seq] -= more[0]
            moved.add(seq)
        elif kind == "anew" and seq not in moved:  # only the caller knows it: a drafted token may be read again as well
            llama_cpp.llama_memory_seq_rm(memory, seq, N - 1, -1)
            if more[0]:
                _native.pcd_begin(context.ctx, seq, N - 1)
            n_twins = context.stats.n_twins
            read(((sure if plain[seq] else unsure)[-1], N - 1, [seq], True))
            assert context.is_plain(0) == plain[seq]
            assert context.stats.n_twins == n_twins + (more[0] or not plain[seq])
            length[seq] = N
        elif kind == "keep":
            llama_cpp.llama_memory_seq_keep(memory, seq)
            plain, length = {seq: plain[seq]}, {seq: length[seq]}
        elif kind == "fail":
            wrong = [(TOKENS[0], length[seq], [seq], True), (10**9, length[seq] + 1, [seq], True)]
            assert decode_batch(context, wrong) != 0
