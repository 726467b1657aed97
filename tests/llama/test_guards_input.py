"""Saved states, grammars, processors, tokens: what llama.cpp takes unseen is checked before it ends the process, or an answer."""

from __future__ import annotations

import itertools
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Tiny, contrasted, native_row, rounding
from own_process import run
from tiny_gguf import CHAT_TEMPLATE

import pypcd

Load = Callable[..., pypcd.Llama]

# --- states ---


@pytest.mark.parametrize("pcd", [False, True, {"cache": "separate"}, "unsure"], ids=str)
@pytest.mark.parametrize("used", [False, True])
def test_a_restored_state_can_be_sampled_from(pcd: Any, used: bool, tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    llm = load(path, pcd)
    llm.eval(TOKENS[:40])
    token, row = llm.sample(temp=0.0), native_row(llm)
    state = pickle.loads(pickle.dumps(llm.save_state()))

    def fresh() -> pypcd.Llama:
        other = load(path, pcd, n_ctx=512, n_batch=32)
        if used:
            other.eval([9, 8, 7])
        other.load_state(state)
        return other

    other = fresh()
    assert other.sample(temp=0.0) == token and other.n_tokens == 40
    limit = rounding(path) if not pcd else contrasted(rounding(path), other.pcd.beta)
    assert np.abs(native_row(other) - row).max() < limit
    assert next(fresh().generate([], temp=0.0, reset=False)) == token
    wanted = list(itertools.islice(llm.generate(TOKENS[:40], temp=0), 8))
    assert list(itertools.islice(fresh().generate(TOKENS[:40], temp=0), 8)) == wanted
    other.eval(TOKENS[40:50])
    llm.reset(), llm.eval(TOKENS[:50])
    assert other.sample(temp=0.0) == llm.sample(temp=0.0)


def test_a_recurrent_state_cannot_go_back_and_says_so(tiny: Tiny, load: Load) -> None:
    for arch in ("mamba", "lfm2"):
        llm, other = load(tiny(arch), False), load(tiny(arch), False)
        llm.eval(TOKENS[:20])
        other.load_state(llm.save_state())
        with pytest.raises(pypcd.PCDError, match="recurrent layers cannot go back by a token; evaluate another token"):
            other.sample()
        llm.eval([7]), other.eval([7])
        assert llm.sample(temp=0.0) == other.sample(temp=0.0)


def test_nothing_to_sample_from_is_an_error(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    for use in (lambda: llm.sample(), lambda: next(llm.generate([])), lambda: llm.eval([]) or llm.sample()):
        with pytest.raises(
            pypcd.PCDError, match=r"no logits to sample from \(0 tokens, idx=.*\): evaluate tokens first"
        ):
            use()
    llm.eval(TOKENS[:30])
    with pytest.raises(pypcd.PCDError, match=r"\(30 tokens, idx=5\): .*only the last one has some"):
        llm.sample(idx=5)
    assert llm.sample(temp=0.0) == llm.sample(temp=0.0, idx=29)


def test_sampling_follows_its_own_arguments_not_those_of_an_earlier_text(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    one = np.full(384, -np.inf, np.float32)
    one[300] = 0
    only = llama_cpp.LogitsProcessorList([lambda tokens, scores: one])
    text = llm.generate(TOKENS[:30], temp=0.0, logits_processor=only)
    assert next(text) == 300
    assert llm.sample(temp=0.0) == int(native_row(llm).argmax()) != 300
    assert next(text) == 300, "the text keeps its own"


def test_a_state_of_another_model_is_refused_and_nothing_changes(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    llm.eval(TOKENS[:30])
    saved = llm.save_state()
    alone = list(itertools.islice(llm.generate(TOKENS[:30], temp=0), 5))
    for wrong in (tiny("llama", seed=5), tiny("qwen2"), tiny("llama", n_vocab=400)):
        other = load(wrong, False)
        other.eval(TOKENS[:30])
        with pytest.raises(ValueError, match="the state is that of another model than"):
            llm.load_state(pickle.loads(pickle.dumps(other.save_state())))
    longer = load(tiny("llama"), False, n_ctx=512)
    longer.eval((TOKENS * 3)[:300])
    with pytest.raises(ValueError, match="the state has 300 tokens; allowed: 256, the context"):
        llm.load_state(longer.save_state())
    with pytest.raises(TypeError, match="the state is a NoneType; allowed: what save_state"):
        llm.load_state(None)
    assert list(itertools.islice(llm.generate(TOKENS[:30], temp=0), 5)) == alone

    saved.llama_state, saved.llama_state_size = saved.llama_state[:500], 500
    with pytest.raises(pypcd.PCDError, match="the state cannot be restored, and the context is empty now: "):
        llm.load_state(saved)
    assert llm.n_tokens == 0
    assert list(itertools.islice(llm.generate(TOKENS[:30], temp=0), 5)) == alone


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be removed there")
def test_a_state_is_saved_after_the_models_file_is_gone(tiny: Tiny, load: Load, tmp_path: Path) -> None:
    path = shutil.copy(tiny("llama"), tmp_path / "there.gguf")
    llm = load(path, False)
    llm.set_cache(llama_cpp.LlamaRAMCache())
    path.unlink()
    alone = llm("abc", max_tokens=5, temperature=0)["choices"]
    assert llm("abc", max_tokens=5, temperature=0)["choices"] == alone
    llm.load_state(llm.save_state())


# --- what users pass ---


def test_a_grammar_that_is_not_valid_is_an_error(tiny: Tiny) -> None:
    bad = ["root ::= (", 'x ::= "a"', "root ::= y", 'root ::= root "a" | "b"', 'root ::= ("")*']
    lines = run(
        tiny("llama"),
        f"""
llm = new()
for text in {bad}:
    grammar = llama_cpp.LlamaGrammar.from_string(text)
    said(lambda: llm("abc", max_tokens=3, grammar=grammar)); llm.eval([5]); said(lambda: llm.sample(grammar=grammar))
said(lambda: llm("abc", grammar='root ::= "a"'))
good = llama_cpp.LlamaGrammar.from_string('root ::= "a"'); print(llm("abc", max_tokens=3, grammar=good)["choices"][0]["text"])""",
        stderr="(?s)(parse: error parsing grammar: .*)?",  # printed by llama.cpp itself
    )
    assert len(lines) == 12 and lines[-1] == "a"
    assert all(line.startswith("InputError: the grammar is not valid: ") for line in lines[:10]), lines
    assert re.match("ArgumentError: grammar is a str; allowed: LlamaGrammar", lines[10])


def test_a_logits_processors_exception_arrives(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    alone = llm("abc", max_tokens=5, temperature=0)["choices"][0]["text"]

    def fails(tokens: Any, scores: Any) -> Any:
        raise KeyError("mine")

    for processor, error, message in (
        (fails, KeyError, "mine"),
        (lambda tokens, scores: scores[:5], ValueError, "broadcast"),
        (lambda tokens, scores: np.full_like(scores, -np.inf), ValueError, "left no token that is possible"),
    ):
        with pytest.raises(error, match=message):
            llm("abc", max_tokens=5, logits_processor=llama_cpp.LogitsProcessorList([processor]))
        assert llm("abc", max_tokens=5, temperature=0)["choices"][0]["text"] == alone
    one = np.full(384, -np.inf, np.float32)
    one[300] = 0
    only = llama_cpp.LogitsProcessorList([lambda tokens, scores: one.tolist()])
    assert list(itertools.islice(llm.generate([1, 2], temp=0, logits_processor=only), 3)) == [300] * 3

    calls = itertools.count()
    later = llama_cpp.LogitsProcessorList([lambda tokens, scores: fails(tokens, scores) if next(calls) else scores])
    stream = llm.generate(TOKENS[:5], temp=0, logits_processor=later)
    next(stream)
    llm.sample(temp=0)  # has processors of its own: none
    with pytest.raises(KeyError, match="mine"):
        next(stream)


def test_tokens_that_the_vocabulary_does_not_have_are_an_error(tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        """
llm = new(); tokenizer = llm.tokenizer()
for use in (lambda: llm.detokenize([5, 10**6]), lambda: llm.detokenize([-1]), lambda: tokenizer.decode([384])): said(use)
print(llm.detokenize([]), llm.detokenize(np.array([300, 301])) == llm.detokenize([300, 301]))""",
    )
    assert [line.split(";")[0] for line in lines[:3]] == [
        f"InputError: token {token} is not in the vocabulary" for token in (10**6, -1, 384)
    ]
    assert lines[3] == "b'' True"


def test_a_text_without_tokens_is_not_embedded_beside_the_memory_of_the_batch(tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        """
llm = new(embedding=True); texts = llm.embed(["abc", "abcd"])
class NoTokens:
    def tokenize(self, *args, **kwargs): return []
llm.tokenizer_ = NoTokens(); said(lambda: llm.embed("x"))
llm.tokenizer_ = llm.tokenizer(); print(np.allclose(llm.embed(["abc", "abcd"])[0], texts[0]))""",
    )
    assert lines == ["InputError: there are no tokens to evaluate; give a text that is not empty", "True"]


OPENING: list[tuple[dict[str, Any], str]] = [
    ({"n_batch": -5}, "n_batch is -5; allowed: an integer of at least 1"),
    ({"n_batch": 0}, "n_batch is 0; allowed"),
    ({"n_seq_max": 65, "n_batch": 64}, "n_seq_max is 65, and n_batch 64; allowed: n_seq_max of at most n_batch"),
    ({"n_threads": 100000}, "n_threads is 100000; allowed: an integer from -1 to 512"),
    ({"n_threads_batch": 513}, "n_threads_batch is 513; allowed"),
    ({"type_k": 999}, "type_k is 999; allowed: 0 .f32., 1 .f16."),
    ({"type_k": 16}, "type_k is 16; allowed"),
    ({"type_v": 16, "flash_attn": True}, "type_v is 16; allowed"),
]


@pytest.mark.parametrize("kwargs", [{"type_k": 8}, {"type_v": 2, "flash_attn": True}])
def test_a_type_whose_blocks_do_not_fit_in_a_head_is_an_error(kwargs: dict[str, Any], tiny: Tiny, load: Load) -> None:
    """llama.cpp ends the process if there is one such head, and reads across blocks if there are several."""
    for n_head_kv in (1, 8):
        with pytest.raises(
            ValueError, match=r"blocks have 32 values, but this model's heads have 8; allowed: 0, 1, 30, or None"
        ):
            load(tiny("llama", n_head=8, n_head_kv=n_head_kv), **kwargs)
    load(tiny("llama", n_head=8), type_k=30, type_v=0).eval([1, 2, 3])


def test_values_at_which_llama_cpp_ends_the_process_are_errors_at_the_opening(tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        "\n".join(f"said(lambda: new(**{kwargs!r})('abc', max_tokens=2))" for kwargs, _ in OPENING),
    )
    for line, (kwargs, message) in zip(lines, OPENING):
        assert re.match(f"InputError: {message}", line), (kwargs, line)
    assert len(lines) == len(OPENING)


@pytest.mark.parametrize("given", [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}])
def test_a_form_of_answers_without_a_schema_is_an_error(given: Any, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama", chat_template=CHAT_TEMPLATE), False)
    with pytest.raises(ValueError, match=r"response_format is .*; allowed"):
        llm.create_chat_completion([{"role": "user", "content": "abc"}], response_format=given)
