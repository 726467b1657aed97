"""min_first_entropy: an answer is plain decoding's to its end where the model is sure of its first token; else PCD's.

Plain rows are held to the library with PCD off, contrasted ones to the reference, entropies to float64."""

from __future__ import annotations

import ctypes
import math
from typing import Callable

import llama_cpp
import numpy as np
import pytest
from batches import Context, Native, Setting, ask, check_seen, decode_batch, decode_in, set_seq
from conftest import TOKENS, Tiny, check_rows, close, native_row, rounding
from reference import bits
from test_min_context import check_plain
from test_min_entropy import CACHES, WAYS

import pypcd
from pypcd.engine import _bindings as _native

Load = Callable[..., pypcd.Llama]
N = 20  # tokens of a prompt


def entropy_after(load: Load, path: str, tokens: list[int]) -> float:
    stock = load(path, False)
    stock.eval(tokens)
    return bits(native_row(stock))


@pytest.fixture
def unlike(tiny: Tiny, load: Load) -> tuple[list[int], list[int], float]:
    """Two prompts, a number of bits that the first row of the one is below of and that of the other above, and no row near."""
    found = sorted((entropy_after(load, tiny("llama"), TOKENS[i : i + N]), i) for i in range(0, 80, 5))
    (low, i), (high, j) = found[0], found[-1]
    assert high - low > 1e-3
    return list(TOKENS[i : i + N]), list(TOKENS[j : j + N]), (low + high) / 2


# -- one sequence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluation", WAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_the_first_token_decides_for_the_whole_answer(
    cache: str, evaluation: str, unlike: tuple[list[int], list[int], float], tiny: Tiny, load: Load
) -> None:
    sure, unsure, least = unlike
    path, answer = tiny("llama"), list(TOKENS[100:110])
    llm, stock = load(path, {"cache": cache, "evaluation": evaluation, "min_first_entropy": least}), load(path, False)
    for prompt in (sure, unsure, sure):
        for other in (llm, stock):
            other.reset()
            other.eval(prompt)
        for i in range(len(answer) + 1):
            if prompt is sure:
                close(native_row(llm), native_row(stock), rounding(path))
                got = llm.pcd_logits()
                assert got.beta is None and np.array_equal(got.contrasted, got.standard)
                assert (got.local is None) == (i > 0 or (evaluation == "alternate" and cache != "separate"))
            else:
                check_rows(llm, path, [*prompt, *answer[:i]])
            for other in (llm, stock):
                other.eval(answer[i : i + 1])


@pytest.mark.parametrize("cache", CACHES)
def test_a_plain_answer_takes_no_twins(
    cache: str, unlike: tuple[list[int], list[int], float], tiny: Tiny, load: Load
) -> None:
    """Not even while cells are rows for both: only the first token's is evaluated, and with alternate none."""
    for evaluation, n_twins in (("fused", 1), ("alternate", 0)):
        llm = load(tiny("llama"), {"cache": cache, "evaluation": evaluation, "min_first_entropy": 100.0})
        llm.eval(unlike[0])
        before = llm.pcd_stats()
        for token in TOKENS[:10]:
            llm.eval([token])
        after = llm.pcd_stats()
        assert after.n_twins == before.n_twins and after.n_skipped == before.n_skipped + 10
        if cache != "separate":
            assert before.n_twins == n_twins


def test_zero_and_a_model_that_is_never_so_sure_contrast_everywhere(tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    plain, low, off = (load(path, s) for s in ({}, {"min_first_entropy": 1e-9}, False))
    texts = []
    for llm in (plain, low, off):
        texts.append([token for token, _ in zip(llm.generate(TOKENS[:N], temp=0.0), range(12))])
    assert texts[0] == texts[1] != texts[2]


def test_what_is_decoded_does_not_depend_on_how_it_is_asked_for(
    unlike: tuple[list[int], list[int], float], tiny: Tiny, load: Load
) -> None:
    """A prompt whose rows are all asked for, a long prompt in parts, a stream, a second answer to the same prompt."""
    sure, unsure, least = unlike
    path, setting = tiny("llama"), {"min_first_entropy": least, "evaluation": "fused"}
    stock = load(path, False)
    for prompt in (sure, unsure):
        wanted = [token for token, _ in zip(stock.generate(prompt, temp=0.0), range(12))]
        if prompt is unsure:
            wanted = [
                token for token, _ in zip(load(path, {"evaluation": "fused"}).generate(prompt, temp=0.0), range(12))
            ]
        for kwargs in ({}, {"logits_all": True}, {"n_batch": 8}):
            llm = load(path, setting, **kwargs)
            for _ in range(2):  # the second time only the prompt's last token is evaluated
                assert [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(12))] == wanted
        llm = load(path, False)
        assert [token for token, _ in zip(llm.generate(prompt, temp=0.0, pcd=setting), range(12))] == wanted


def test_a_prompt_that_is_the_beginning_of_the_last_answer_has_an_answer_of_its_own(tiny: Tiny, load: Load) -> None:
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
                llm = load(path, setting, **kwargs)
                for prompt in prompts:
                    steps = zip(llm.generate(prompt, temp=0.0), range(5))
                    next(steps)
                    answers.append(llm.pcd_logits().beta)
                    if prompt is short:  # its first token is followed by another, so that it is in the cache
                        llm.eval(long[-1:])
            assert answers[0] == answers[2] and (answers[0] is None) == (sign < 0)


def test_a_saved_state_does_not_have_the_last_answers_entropy(
    unlike: tuple[list[int], list[int], float], tiny: Tiny, load: Load
) -> None:
    path = tiny("llama")
    for a, b in (unlike[:2], unlike[1::-1]):
        llm = load(path, {"min_first_entropy": unlike[2], "evaluation": "fused"})
        wanted = [token for token, _ in zip(llm.generate(a, temp=0.0), range(12))]
        state = llm.save_state()
        for _ in zip(llm.generate(b[2:], temp=0.0), range(12)):
            pass
        llm.load_state(state)
        llm.n_tokens = N - 1  # as generate() does, where it evaluates a cached prompt's last token alone
        llm.eval(a[-1:])
        first = llm.pcd_logits()
        assert first.local is not None  # evaluated as the first one of an answer
        assert [token for token, _ in zip(llm.generate(a, temp=0.0), range(12))] == wanted


def test_asking_for_all_rows_without_pcd_makes_nothing_of_pcd(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False, logits_all=True)
    llm.eval(TOKENS[:10])
    _native.pcd_begin(llm.ctx, 0, 10)
    llm.eval(TOKENS[10:12])
    assert _native.pcd_get_graph_stats(llm.ctx).n_computed == 0  # which counts from when PCD is made in a context


def test_an_answer_before_min_context_stays_plain_to_its_end(tiny: Tiny, load: Load) -> None:
    setting = {"min_first_entropy": 1e-9, "min_context": N + 3}
    llm, stock = load(tiny("llama"), setting), load(tiny("llama"), False)
    for end in (N, *range(N + 1, N + 10)):
        for other in (llm, stock):
            other.eval(TOKENS[other.n_tokens : end])
        check_plain(llm, native_row(stock))
    for other in (llm, stock):
        other.eval(TOKENS[other.n_tokens : other.n_tokens + 5])  # text: what follows is another answer
    check_rows(llm, tiny("llama"), TOKENS[: llm.n_tokens])


# -- positions -----------------------------------------------------------------------------------------------------------


def test_tokens_that_are_taken_back_do_not_begin_an_answer(
    unlike: tuple[list[int], list[int], float], native: Native
) -> None:
    sure, unsure, least = unlike
    context = native("llama", {"min_first_entropy": least})
    for prompt in (sure, unsure):
        assert decode_batch(context, [(token, p, [0], p == N - 1) for p, token in enumerate(prompt)]) == 0
        at = N
        for n_right in (2, 0, 1):  # of two drafted tokens, so many were right
            assert decode_batch(context, [(TOKENS[at + i], at + i, [0], True) for i in range(3)]) == 0
            for i in range(3):
                assert math.isnan(_native.pcd_get_strength_ith(context.ctx, i)) == (prompt is sure)
            at += 1 + n_right
            llama_cpp.llama_memory_seq_rm(context.memory, 0, at, -1)
        llama_cpp.llama_memory_seq_rm(context.memory, 0, 0, -1)


def test_copies_of_a_sequence_go_on_with_its_answer(unlike: tuple[list[int], list[int], float], native: Native) -> None:
    sure, unsure, least = unlike
    context = native("llama", {"min_first_entropy": least}, n_seq_max=3)
    for prompt in (sure, unsure):
        llama_cpp.llama_memory_clear(context.memory, True)
        assert decode_batch(context, [(token, p, [0], p == N - 1) for p, token in enumerate(prompt)]) == 0
        llama_cpp.llama_memory_seq_cp(context.memory, 0, 2, -1, -1)
        assert decode_batch(context, [(TOKENS[s], N, [s], True) for s in (0, 2)]) == 0
        for i in range(2):
            assert math.isnan(_native.pcd_get_strength_ith(context.ctx, i)) == (prompt is sure)
        llama_cpp.llama_memory_seq_keep(context.memory, 2)
        assert decode_batch(context, [(TOKENS[7], N + 1, [2], True)]) == 0
        assert math.isnan(_native.pcd_get_strength_ith(context.ctx, 0)) == (prompt is sure)


def read_prompt(context: Context, prompt: list[int], seqs: tuple[int, ...] = (0,)) -> None:
    assert decode_batch(context, [(token, p, [*seqs], p == N - 1) for p, token in enumerate(prompt)]) == 0


def is_plain(context: Context, i: int = 0) -> bool:
    return math.isnan(_native.pcd_get_strength_ith(context.ctx, i))


def shift(context: Context, seq: int, n: int) -> None:
    """As servers do where the context is full: n tokens behind the first two go."""
    llama_cpp.llama_memory_seq_rm(context.memory, seq, 2, 2 + n)
    llama_cpp.llama_memory_seq_add(context.memory, seq, 2 + n, -1, -n)


def test_a_prompt_that_sequences_share_begins_the_answers_of_all(
    unlike: tuple[list[int], list[int], float], native: Native
) -> None:
    sure, unsure, least = unlike
    for prompt in (sure, unsure):
        context = native("llama", {"beta": 2.0, "evaluation": "fused"}, n_seq_max=3)
        for seq in (1, 2):
            assert set_seq(context, seq, {"beta": 2.0, "evaluation": "fused", "min_first_entropy": least}) == (0, "")
        read_prompt(context, prompt, (0, 1, 2))
        assert decode_batch(context, [(TOKENS[s], N, [s], True) for s in range(3)]) == 0
        assert [is_plain(context, i) for i in range(3)] == [False, prompt is sure, prompt is sure]


@pytest.mark.parametrize("n", [10, N - 1, N, N + 2])  # from N - 1 on the answer's first token is at position 0, or gone
def test_a_context_shift_goes_on_with_the_answer(
    n: int, unlike: tuple[list[int], list[int], float], native: Native
) -> None:
    sure, unsure, least = unlike
    for prompt in (sure, unsure):
        context = native("llama", {"min_first_entropy": least, "min_context": 5})
        read_prompt(context, prompt)
        for p in range(N, N + 12):
            assert decode_batch(context, [(TOKENS[p], p, [0], True)]) == 0
        shift(context, 0, n)
        n_free = 256 - (N + 12 - n)
        assert decode_batch(context, [(TOKENS[i % 99], N + 12 - n + i, [0], True) for i in range(n_free + 1)]) != 0
        for p in range(N + 12, N + 16):
            assert decode_batch(context, [(TOKENS[p], p - n, [0], True)]) == 0
            assert is_plain(context) == (prompt is sure)


def test_tokens_taken_back_in_one_sequence_and_a_shift_in_another_do_not_mix(
    unlike: tuple[list[int], list[int], float], native: Native
) -> None:
    sure, unsure, least = unlike
    context = native("llama", {"min_first_entropy": least, "evaluation": "fused"}, n_seq_max=2)
    read_prompt(context, sure)
    read_prompt(context, unsure, (1,))
    for p in range(N, N + 4):
        assert decode_batch(context, [(TOKENS[p], p, [0], True), (TOKENS[p], p, [1], True)]) == 0
    llama_cpp.llama_memory_seq_rm(context.memory, 0, N - 1, -1)
    _native.pcd_begin(context.ctx, 0, N - 1)
    shift(context, 1, 10)
    assert decode_batch(context, [(unsure[-1], N - 1, [0], True), (TOKENS[3], N - 6, [1], True)]) == 0
    assert _native.pcd_get_logits_ith(context.ctx, 0, _native.ROW_LOCAL)  # the first row of another answer
    assert not is_plain(context, 1)


def test_only_a_caller_knows_that_an_answer_is_given_anew(
    unlike: tuple[list[int], list[int], float], native: Native
) -> None:
    """The prompt's last token, taken back and read again, may be a drafted token as well."""
    sure, _, least = unlike
    context = native("llama", {"min_first_entropy": least, "evaluation": "fused"})
    read_prompt(context, sure)
    for begins in (False, True):
        llama_cpp.llama_memory_seq_rm(context.memory, 0, N - 1, -1)
        if begins:
            _native.pcd_begin(context.ctx, 0, N - 1)
        n_twins = _native.pcd_get_stats(context.ctx).n_twins
        assert decode_batch(context, [(sure[-1], N - 1, [0], True)]) == 0
        assert is_plain(context) and _native.pcd_get_stats(context.ctx).n_twins == n_twins + begins


@pytest.mark.parametrize("evaluation", WAYS)
def test_each_sequence_has_its_own(evaluation: str, unlike: tuple[list[int], list[int], float], native: Native) -> None:
    sure, unsure, least = unlike
    base: Setting = {"evaluation": evaluation}
    context, stock = native("llama", base, n_seq_max=3), native("llama", n_seq_max=3)
    for seq, own in enumerate((least, least, 0.0)):
        assert set_seq(context, seq, {**base, "min_first_entropy": own, "beta": 1.0}) == (0, "")
    prompts = [sure, unsure, sure]
    entries = [(prompts[s][p], p, [s], p == N - 1) for s in range(3) for p in range(N)]
    assert decode_batch(context, entries) == decode_batch(stock, entries) == 0
    for step in range(4):
        entries = [(TOKENS[10 * s + step], N + step, [s], True) for s in range(3)]
        assert decode_batch(context, entries) == decode_batch(stock, entries) == 0
        close(context.seen(0), stock.seen(0), context.limit)
        assert math.isnan(_native.pcd_get_strength_ith(context.ctx, 0))
        for i in (1, 2):
            check_seen(context, i, {"beta": 1.0})


def test_what_another_sequence_decodes_with_pcd_off_leaves_an_answer_alone(
    unlike: tuple[list[int], list[int], float], native: Native
) -> None:
    """And its own tokens end it."""
    sure, _, least = unlike
    setting, params = {"min_first_entropy": least}, {"n_seq_max": 2}
    context, alone = native("llama", setting, **params), native("llama", setting, **params)
    answer = TOKENS[100:106]
    decode_in((context, alone), sure)
    for token in answer:
        decode_in((context, alone), [token])
        check_plain(context, context.seen())
        close(context.seen(), alone.seen(), context.limit)
        assert _native.pcd_set(context.ctx, None, None, 0) == _native.OK
        assert context.decode([token], seq=1) == 0
        assert ask(context, setting) == (_native.OK, "")
    n_twins = _native.pcd_get_stats(context.ctx).n_twins
    assert _native.pcd_set(context.ctx, None, None, 0) == _native.OK
    assert context.decode(TOKENS[20:30]) == 0
    assert ask(context, setting) == (_native.OK, "")
    decode_in([context], TOKENS[30:31])  # another answer's first token, of which it asks
    assert _native.pcd_get_stats(context.ctx).n_twins == n_twins + 1


def test_a_batch_that_fails_changes_nothing(unlike: tuple[list[int], list[int], float], native: Native) -> None:
    sure, _, least = unlike
    context = native("llama", {"min_first_entropy": least})
    assert decode_batch(context, [(token, p, [0], p == N - 1) for p, token in enumerate(sure)]) == 0
    assert (
        decode_batch(context, [(TOKENS[0], N, [0], True), (TOKENS[0], N + 7, [0], False), (10**9, N + 1, [0], True)])
        != 0
    )
    assert decode_batch(context, [(TOKENS[0], N, [0], True)]) == 0
    assert math.isnan(_native.pcd_get_strength_ith(context.ctx, 0))


# -- values --------------------------------------------------------------------------------------------------------------


def test_values_that_are_not_allowed(native: Native) -> None:
    for value in (-1, 101):
        with pytest.raises(ValueError, match=f"min_first_entropy is {value}; allowed: from 0 to 100"):
            pypcd.PCDConfig(min_first_entropy=value)
    assert pypcd.PCDConfig.resolve("window:min_first_entropy=2").describe().endswith("min_first_entropy=2.0")
    context, params, error = native("llama"), _native.pcd_default_params(), ctypes.create_string_buffer(500)
    params.min_first_entropy = 101
    assert _native.pcd_set(context.ctx, ctypes.byref(params), error, 500) == _native.INVALID
    assert error.value.decode() == "min_first_entropy is 101, allowed: 0 to 100"
