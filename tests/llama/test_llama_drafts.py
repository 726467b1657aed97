"""Decoding with a draft model: the same tokens as without one, and a twin for each row that is read. Time is made up."""

from __future__ import annotations

import contextlib
import itertools
import logging
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable

import llama_cpp
import numpy as np
import pytest
from conftest import (
    F32,
    SMALL,
    TOKENS,
    UNKNOWN,
    Tiny,
    check_contrast,
    check_rows,
    close,
    contrasted,
    expected,
    native_row,
    on_stock,
    rounding,
    tolerance,
    turn,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from tiny_gguf import CHAT_TEMPLATE

import pypcd
from pypcd import PCDConfig
from pypcd.decode import Session
from pypcd.drafts import Drafts
from pypcd.evaluation import ModelTokenizer, task

Load = Callable[..., pypcd.Llama]
T = TOKENS
MODES: list[Any] = [
    *({"cache": c, "evaluation": e} for c in ("rerotated", "shared", "separate") for e in ("fused", "alternate")),
    "window",
    False,
]
STOCK = pytest.param("window", id="stock-window", marks=on_stock)
modes = pytest.mark.parametrize("mode", [*MODES, STOCK], ids=str)
native_modes = pytest.mark.parametrize("mode", MODES, ids=str)  # swa_full=False is refused on stock
PROMPT = "the first words of a prompt"


class Knowing(LlamaDraftModel):
    """Guesses from a text that it knows, wrong at some positions."""

    def __init__(self, text: Sequence[int] = (), wrong: Sequence[int] = (), n: int = 6) -> None:
        self.text = [(token + 1) % 384 if i in wrong else token for i, token in enumerate(text)]
        self.n = n
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        self.lengths.append(len(input_ids))
        return np.array(self.text[len(input_ids) :][: self.n], dtype=np.intc)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """All guesses are evaluated, whatever they cost."""
    monkeypatch.setattr(Drafts, "_choose", lambda self, most: most)


def generated(llm: pypcd.Llama, prompt: Sequence[int], n: int, **kwargs: Any) -> list[int]:
    return list(itertools.islice(llm.generate(list(prompt), **{"temp": 0.0, **kwargs}), n))


def spied(llm: pypcd.Llama, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in each evaluation from here on."""
    sizes: list[int] = []
    evaluate = llm.eval
    monkeypatch.setattr(llm, "eval", lambda tokens: sizes.append(len(tokens)) or evaluate(tokens))
    return sizes


# --- the tokens of decoding without a draft ---


@modes
def test_drafted_tokens_are_those_of_decoding_without(mode: Any, tiny: Tiny, load: Load, eager: None) -> None:
    for arch in sorted({"llama", "gemma3"} - UNKNOWN):
        plain, n = load(tiny(arch), mode), 60
        wanted = generated(plain, T[:40], n)
        for wrong in ((), (41, 42, 50, 57, 58, 59, 60, 75), range(999)):
            llm = load(tiny(arch), mode, draft_model=Knowing(T[:40] + wanted + T[:20], wrong))
            assert generated(llm, T[:40], n) == wanted
            assert (llm.n_tokens, llm.input_ids[: llm.n_tokens].tolist()) == (99, T[:40] + wanted[:-1])


SAMPLING: list[dict[str, Any]] = [
    {"temp": 0.0},
    {"temp": 1.5},
    {"temp": 0.9, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "frequency_penalty": 0.7, "repeat_penalty": 1.2},
    {"temp": 1.0, "mirostat_mode": 1},
    {"temp": 1.0, "mirostat_mode": 2, "mirostat_tau": 3.0},
    {"temp": -1.0},
]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    mode=st.sampled_from([MODES[0], MODES[4], "window", "window:min_entropy=5.5", "cautious", False]),
    sampling=st.sampled_from(SAMPLING),
    wrong=st.sets(st.integers(30, 90)),
    n_guesses=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_sampled_tokens_are_those_of_decoding_without(
    tiny: Tiny, eager: None, mode: Any, sampling: dict[str, Any], wrong: set[int], n_guesses: int, seed: int
) -> None:
    """The sampler is asked once for each token, for the row of that token: drafts change neither.

    A row of several in a batch differs by rounding from the same alone, and once in thousands of texts the random number lies
    just between two tokens. A second seed tells that from a mistake."""
    with contextlib.closing(pypcd.Llama(tiny("llama"), pcd=mode, **SMALL, **F32)) as llm:
        texts = []
        for each in (seed, seed + 100):
            llm.set_seed(each)
            llm.draft_model = None
            wanted = generated(llm, T[:30], 40, **sampling)
            llm.draft_model = Knowing(T[:30] + wanted, tuple(wrong), n_guesses)
            texts.append((generated(llm, T[:30], 40, **sampling), wanted))
            if texts[-1][0] == wanted:
                return
        assert [drafted for drafted, _ in texts] == [wanted for _, wanted in texts]


def test_completions_are_those_of_decoding_without(tiny: Tiny, load: Load, eager: None) -> None:
    path = tiny("llama", chat_template=CHAT_TEMPLATE)
    plain, llm = load(path, "cautious", logits_all=True), load(path, "cautious", logits_all=True)
    whole = plain(PROMPT, max_tokens=60, temperature=0)["choices"][0]["text"]
    seen = plain.input_ids[: plain.n_tokens].tolist()
    llm.draft_model = Knowing(seen + T[:9], (seen.index(seen[-1]), 40, 47), 9)
    stop = next(c for c in whole[5:] if c.isalnum() and c.isascii())
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("7" | "x") "-" [0-9]+ "!"', verbose=False)
    calls: list[dict[str, Any]] = [
        {"max_tokens": 60},
        {"max_tokens": 60, "stop": [stop]},
        {"max_tokens": 23, "logprobs": 3},
        {"max_tokens": 23, "logprobs": 3, "echo": True},
        {"max_tokens": 30, "grammar": grammar},
        {"max_tokens": 30, "grammar": grammar, "pcd": "cautious"},
        {"max_tokens": 30, "logit_bias": {seen[-1]: -100.0, 65: 3.0}},
        {"max_tokens": 30, "stream": True},
        {"max_tokens": 30, "stream": True, "logprobs": 2, "pcd": {"beta": 1.0, "gamma": 5}},
        {"max_tokens": 30, "pcd": False},
        {"max_tokens": 30, "pcd": "window"},
        {"max_tokens": 30, "temperature": 1.3, "seed": 5},
        {"max_tokens": 30, "stopping_criteria": llama_cpp.StoppingCriteriaList([lambda ids, row: len(ids) >= 40])},
    ]
    limit = contrasted(2 * rounding(path), 1.5)
    for call in calls:
        first, second = (answer(each, **call) for each in (plain, llm))
        assert same(first, second, limit), call
        assert plain.input_ids[: plain.n_tokens].tolist() == llm.input_ids[: llm.n_tokens].tolist(), call


def answer(llm: pypcd.Llama, **call: Any) -> Any:
    """A completion, without its name and date."""
    made = llm(PROMPT, **{"temperature": 0, **call})
    chunks = list(made) if isinstance(made, Iterator) else [made]
    return [(chunk["choices"], chunk.get("usage")) for chunk in chunks]


def same(first: Any, second: Any, limit: float) -> bool:
    """Equal, but for numbers, which another shape of a batch may round otherwise."""
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key], limit) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b, limit) for a, b in zip(first, second))
    return abs(first - second) < limit if isinstance(first, (float, np.floating)) else first == second


def test_an_end_of_sequence_inside_a_draft_ends_the_answer(tiny: Tiny, load: Load, eager: None) -> None:
    llm = load(tiny("llama"), "paper")
    prompt = llm.tokenize(PROMPT.encode())
    wanted = generated(llm, prompt, 12)
    end = {llm.token_eos(): 0.0}
    bias = llama_cpp.LogitsProcessorList(
        [lambda ids, row: np.where(np.arange(len(row)) == next(iter(end)), 1e9 * (len(ids) == len(prompt) + 5), row)]
    )
    plain = llm(PROMPT, max_tokens=12, temperature=0, logits_processor=bias)
    llm.draft_model = Knowing([*prompt, *wanted[:5], llm.token_eos(), *wanted[6:]])
    assert llm(PROMPT, max_tokens=12, temperature=0, logits_processor=bias)["choices"] == plain["choices"]
    assert plain["choices"][0]["finish_reason"] == "stop" and plain["usage"]["completion_tokens"] == 5


def test_a_logits_processor_sees_the_text_it_continues_and_its_row(tiny: Tiny, load: Load, eager: None) -> None:
    seen: dict[str, list[Any]] = {"plain": [], "drafted": []}
    llm = load(tiny("llama"), {"gamma": 7})

    def processor(name: str) -> Any:
        return llama_cpp.LogitsProcessorList([lambda ids, row: seen[name].append((ids.tolist(), row.copy())) or row])

    wanted = generated(llm, T[:30], 20, logits_processor=processor("plain"))
    llm.draft_model = Knowing(T[:30] + wanted, (33, 40))
    assert generated(llm, T[:30], 20, logits_processor=processor("drafted")) == wanted
    assert [ids for ids, _ in seen["drafted"]] == [ids for ids, _ in seen["plain"]]
    for (_, row), (_, other) in zip(seen["plain"], seen["drafted"]):
        assert np.array_equal(row > -1000, other > -1000)


@modes
def test_the_last_cells_of_a_context_are_used(mode: Any, tiny: Tiny, load: Load, eager: None) -> None:
    """Up to the last token; the error then is the one without a draft."""
    made, errors = [], []
    for drafts in (None, LlamaPromptLookupDecoding(1, 50)):
        llm = load(tiny("llama"), mode, draft_model=drafts)
        prompt = (T * 2)[:170]
        made.append([])
        with pytest.raises(ValueError, match="1 more tokens after 256 exceed the context of 256") as error:
            for token in llm.generate(prompt, temp=0.0):
                made[-1].append(token)
        errors.append(str(error.value))
        assert generated(llm, prompt, 20) == made[-1][:20]  # the error leaves nothing behind
    assert made[0] == made[1] and len(made[0]) == 87 and errors[0] == errors[1]


def test_a_changed_setting_holds_from_the_next_token_on(tiny: Tiny, load: Load, eager: None) -> None:
    plain, llm = load(tiny("llama"), "paper"), load(tiny("llama"), "paper")

    def run(each: pypcd.Llama) -> list[int]:
        made = []
        for token in each.generate(T[:40], temp=0.0):
            made.append(token)
            if len(made) % 7 == 0:
                each.pcd = (False, "window", {"beta": 1.0}, "cautious")[len(made) // 7 % 4]
            if len(made) == 45:
                return made
        return made

    wanted = run(plain)
    llm.draft_model = Knowing(T[:40] + wanted)
    assert run(llm) == wanted
    llm.pcd = plain.pcd = "paper"
    assert len(set(map(tuple, (wanted, generated(plain, T[:40], 45))))) == 2  # else this test shows nothing


def test_tokens_sent_to_the_generator_are_guesses_too(tiny: Tiny, load: Load, eager: None) -> None:
    llm = load(tiny("llama"), "paper")
    wanted = generated(llm, T[:30], 12)
    llm.draft_model = Knowing(T[:30] + wanted, (36,))
    tokens = llm.generate(T[:30], temp=0.0)
    made = [next(tokens)]
    for sent in ([wanted[1], wanted[2]], None, [9, 9], None, None, [], None, None, None, None, None):
        made.append(tokens.send(sent))
    assert made == wanted


@pytest.mark.parametrize("how_many", ["all", "measured"])
@pytest.mark.parametrize("setting", [True, "window", False], ids=str)
def test_values_copied_from_a_prompt_are_those_without(setting: Any, how_many: str, request: Any) -> None:
    if how_many == "all":
        request.getfixturevalue("eager")
    options: dict[str, Any] = {"pcd": setting, "n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}
    with contextlib.closing(pypcd.Llama("demo", **options)) as llm:
        questions = [sample.prompt.text for sample in task("kv-short").samples(4, 200, ModelTokenizer(llm), 0)]
        plain = [llm(question, max_tokens=10, temperature=0)["choices"] for question in questions]
        llm.draft_model = LlamaPromptLookupDecoding()
        assert [llm(question, max_tokens=10, temperature=0)["choices"] for question in questions] == plain


# --- what is left behind ---


@pytest.mark.parametrize("swa_full", [True, False])
@native_modes
def test_wrong_guesses_leave_no_trace(mode: Any, swa_full: bool, tiny: Tiny, load: Load, eager: None) -> None:
    """Of a drafted text every row is that of a fresh evaluation; pcd_logits() is that of the token just made."""
    arch = "llama" if swa_full else "gemma3"
    llm = load(tiny(arch), mode, swa_full=swa_full)
    wanted = generated(llm, T[:50], 40)
    text = T[:50] + wanted
    llm.draft_model = Knowing(text, range(53, 90, 3), 5)
    llm.reset()
    for n, token in enumerate(llm.generate(T[:50], temp=0.0), 50):
        assert token == text[n]
        if llm.pcd:
            check_row_of_the_token_just_made(llm, tiny(arch), text[:n])
        if n == 88:
            break
    llm.eval(T[:3])
    if llm.pcd:
        check_rows(llm, tiny(arch), text[:88] + T[:3])
    else:
        close(native_row(llm), expected(tiny(arch), text[:88] + T[:3], 90, pypcd.PCDConfig())[0], tolerance(tiny(arch)))


@native_modes
def test_a_cache_that_forgets_keeps_what_a_wrong_guess_needs(mode: Any, tiny: Tiny, load: Load, eager: None) -> None:
    """Sliding windows of 16 in 256 cells, all of them in use."""
    llm = load(tiny("gemma3"), mode, swa_full=False, n_ctx=1024, n_batch=32, n_ubatch=32)
    prompt = (T * 3)[:300]
    wanted = generated(llm, prompt, 60)
    for wrong in (range(303, 400, 4), range(400)):
        llm.draft_model = Knowing(prompt + wanted + T[:20], wrong, 12)
        llm.reset()
        assert generated(llm, prompt, 60) == wanted


def check_row_of_the_token_just_made(llm: pypcd.Llama, path: Any, text: list[int]) -> None:
    got, wanted = llm.pcd_logits(), expected(path, text, len(text) - 1, llm.pcd)
    limit = tolerance(path, len(text))
    close(got.standard, wanted[0], limit)
    close(got.local, wanted[1], limit * turn(path, llm.pcd))
    check_contrast(got, llm.pcd, native_row(llm, -1 - llm._n_unread))


def test_a_state_saved_or_an_answer_stopped_in_a_draft_is_that_without(tiny: Tiny, load: Load, eager: None) -> None:
    plain, llm = load(tiny("llama"), "paper"), load(tiny("llama"), "paper")
    wanted = generated(plain, T[:40], 30)
    llm.draft_model = Knowing(T[:40] + wanted)
    for n in range(3, 9):
        tokens = llm.generate(T[:40], temp=0.0)
        assert list(itertools.islice(tokens, n)) == wanted[:n]
        tokens.close()
        assert llm.n_tokens == 40 + n - 1
        state = llm.save_state()
        assert generated(llm, T[:40] + wanted[:n], 20) == wanted[n : n + 20]
        llm.load_state(state)
        assert state.n_tokens == 40 + n - 1
        assert generated(llm, T[:40] + wanted[:n], 20) == wanted[n : n + 20]
    tokens, made = llm.generate(T[:40], temp=0.0), []
    for _ in range(6):  # half-way, and the answer goes on
        made.append(next(tokens))
        state = llm.save_state()
        assert state.n_tokens == 40 + len(made) - 1
    assert [*made, *itertools.islice(tokens, 10)] == wanted[:16]
    llm.load_state(state)
    llm.eval(T[:2])
    check_rows(llm, tiny("llama"), T[:40] + wanted[:5] + T[:2])
    tokens = llm.generate(T[:40], temp=0.0)
    next(tokens), next(tokens)
    llm.reset()
    llm.eval(T[:70])
    tokens.close()  # its unread guesses are gone already
    assert llm.n_tokens == 70
    check_rows(llm, tiny("llama"), T[:70])


def test_a_stream_dropped_while_another_thread_has_the_turn_changes_nothing_there(
    tiny: Tiny, load: Load, eager: None
) -> None:
    """The other thread's call comes behind the tokens that were read."""
    plain, llm = load(tiny("llama"), "paper"), load(tiny("llama"), "paper")
    wanted = generated(plain, T[:40], 30)
    llm.draft_model = Knowing(T[:40] + wanted)
    tokens = llm.generate(T[:40], temp=0.0)
    made = [next(tokens), next(tokens)]
    before = llm.n_tokens
    assert made == wanted[:2] and before > 41, "there is nothing unread"
    with ThreadPoolExecutor(1) as other:
        other.submit(llm._lock.acquire).result()
        tokens.close()
        assert llm.n_tokens == before
        other.submit(llm.eval, T[:2]).result()
        other.submit(llm._lock.release).result()
    assert llm.n_tokens == 43
    check_rows(llm, tiny("llama"), T[:40] + wanted[:1] + T[:2])


def test_rows_of_another_prompt_count_nothing_of_a_draft(tiny: Tiny, load: Load, eager: None) -> None:
    """A prompt of one token is evaluated without eval()."""
    llm = load(tiny("llama"), "paper")
    wanted = generated(llm, T[:40], 12)
    llm.draft_model = Knowing(T[:40] + wanted)
    generated(llm, T[:40], 3)
    assert llm._n_unread
    row = Session(llm).start(T[:1], PCDConfig())
    assert np.array_equal(llm.pcd_logits().contrasted.argmax(), row.argmax())


def test_the_number_of_threads_changes_at_prompts_alone(
    tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch, eager: None
) -> None:
    llm = load(tiny("llama"), "paper")
    wanted = generated(llm, T[:40], 20)
    llm.draft_model = Knowing(T[:40] + wanted)
    renewed, sizes = [], spied(llm, monkeypatch)
    monkeypatch.setattr(llm, "_renew_threads", lambda: renewed.append(len(sizes)))
    llm.reset()
    assert generated(llm, T[:40], 20) == wanted and max(sizes[1:]) > 1
    assert renewed == [1]


def test_a_ram_cache_gives_the_answers_without(tiny: Tiny, load: Load, eager: None) -> None:
    llm, fresh = load(tiny("llama"), "paper"), load(tiny("llama"), "paper")
    llm.set_cache(llama_cpp.LlamaRAMCache())
    llm.draft_model = LlamaPromptLookupDecoding(1, 7)
    for prompt in (PROMPT, "another prompt, quite unlike it", PROMPT, PROMPT + " and more"):
        assert (
            llm(prompt, max_tokens=20, temperature=0)["choices"]
            == fresh(prompt, max_tokens=20, temperature=0)["choices"]
        )


# --- what is evaluated ---


@pytest.mark.parametrize("mode", [*(m for m in MODES if m), STOCK], ids=str)
def test_the_tokens_of_a_prompt_get_no_twins(mode: Any, tiny: Tiny, load: Load, monkeypatch: Any, eager: None) -> None:
    llm = load(tiny("llama"), mode)
    wanted = generated(llm, T[:110], 30)
    llm.draft_model = Knowing(T[:110] + wanted, (115, 125))
    before, sizes = llm.pcd_stats(), spied(llm, monkeypatch)
    llm.reset()
    assert generated(llm, T[:110], 30) == wanted
    stats = llm.pcd_stats()
    read = 1 + sum(sizes[1:])  # the prompt's last token, and each token of a step
    assert sizes[0] == 110 and stats.n_tokens - before.n_tokens == read and len(sizes) < 12
    assert stats.n_twins - before.n_twins + stats.n_skipped - before.n_skipped == read


def test_a_prompt_longer_than_a_batch_is_read(tiny: Tiny, load: Load) -> None:
    """llama_cpp keeps no more than n_batch rows, unless logits_all is set, and fails where a draft needs more."""
    for kwargs in ({}, {"logits_all": True}):
        llm = load(tiny("llama"), "paper", n_batch=16, **kwargs)
        wanted = generated(llm, T, 9)
        llm.draft_model = LlamaPromptLookupDecoding(1, 4)
        llm.reset()
        assert generated(llm, T, 9) == wanted


def test_a_step_fits_in_one_batch_with_its_twins(tiny: Tiny, load: Load, monkeypatch: Any, eager: None) -> None:
    llm = load(tiny("llama"), "paper", n_batch=20, n_ubatch=14)
    wanted = generated(llm, T[:30], 40)
    llm.draft_model = Knowing(T[:30] + wanted, (), 30)
    sizes = spied(llm, monkeypatch)
    assert generated(llm, T[:30], 40) == wanted and max(sizes[1:]) == 7


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
def test_a_model_that_cannot_go_back_does_without(arch: str, tiny: Tiny, load: Load, caplog: Any, eager: None) -> None:
    pcd = {"perturbation": "none", "window": 9} if arch == "lfm2" else False
    wanted = generated(load(tiny(arch), pcd), T[:30], 20)
    with caplog.at_level(logging.WARNING, "pypcd"):
        llm = load(tiny(arch), pcd, draft_model=Knowing(T[:30] + wanted, (33,)))
    assert [r.message for r in caplog.records] == [
        "draft_model is not used: this model has recurrent layers, which cannot go back where a guess was wrong"
    ]
    assert llm.draft_model is None and generated(llm, T[:30], 20) == wanted


def test_the_draft_model_is_kept_and_its_error_comes_through(tiny: Tiny, load: Load) -> None:
    mine = Knowing([1, 2])
    llm = load(tiny("llama"), "paper", draft_model=mine)
    assert llm.draft_model.model is mine
    llm.draft_model = llm.draft_model
    assert llm.draft_model.model is mine
    with contextlib.closing(pickle.loads(pickle.dumps(llm))) as twin:
        assert twin.draft_model.model.text == [1, 2] and twin.pcd == llm.pcd

    def broken(input_ids: Any, /, **kwargs: Any) -> Any:
        raise RuntimeError("out of guesses")

    llm.draft_model = broken
    with pytest.raises(RuntimeError, match="out of guesses"):
        generated(llm, T[:30], 5)
    llm.draft_model = None
    assert llm.draft_model is None and len(generated(llm, T[:30], 5)) == 5
    with pytest.raises(ValueError, match="logits_all=False"):
        load(tiny("llama"), "paper", draft_model=mine)(PROMPT, logprobs=1)
