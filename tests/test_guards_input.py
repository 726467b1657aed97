"""Saved states, grammars, processors, tokens: what llama.cpp takes unseen is checked before it ends the process, or an answer."""

from __future__ import annotations

import itertools
import pickle
from typing import Any, Callable

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Tiny, contrasted, native_row, rounding
from own_process import run

import pypcd

Load = Callable[..., pypcd.Llama]

# --- states ---


@pytest.mark.parametrize("pcd", [False, True, {"cache": "separate"}, "gentle"], ids=str)
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
    for use in (
        lambda: llm.sample(),
        lambda: next(llm.generate([])),
        lambda: next(llm.generate([], reset=False)),
        lambda: llm.eval([]) or llm.sample(),
    ):
        with pytest.raises(pypcd.PCDError, match=r"no logits to sample from \(0 tokens.*evaluate tokens first"):
            use()
    llm.eval(TOKENS[:30])
    with pytest.raises(pypcd.PCDError, match=r"\(30 tokens, idx=5\)"):
        llm.sample(idx=5)
    assert llm.sample(temp=0.0) == llm.sample(temp=0.0, idx=29)
    llm.reset()
    with pytest.raises(pypcd.PCDError, match="evaluate tokens first"):
        llm.sample()


def test_sampling_follows_its_own_arguments_not_those_of_an_earlier_text(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    one = np.full(384, -np.inf, np.float32)
    one[300] = 0
    only = llama_cpp.LogitsProcessorList([lambda tokens, scores: one])
    text = llm.generate(TOKENS[:30], temp=0.0, logits_processor=only)
    assert next(text) == 300
    assert llm.sample(temp=0.0) == int(native_row(llm).argmax()) != 300
    assert next(text) == 300, "the text keeps its own"


def test_a_state_of_another_model_or_a_damaged_one_is_refused_and_nothing_changes(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    llm.eval(TOKENS[:30])
    alone = list(itertools.islice(llm.generate(TOKENS[:30], temp=0), 5))

    def state(**changed: Any) -> llama_cpp.LlamaState:
        made = pickle.loads(pickle.dumps(saved))
        vars(made).update(changed)
        return made

    llm.eval([5])
    saved = llm.save_state()
    data = saved.llama_state
    flipped = bytes([*data[:99], data[99] ^ 1, *data[100:]])
    for wrong, message in (
        (state(llama_state=flipped), "the state is damaged: its bytes are not those"),
        (state(llama_state=data[:500]), "is damaged"),
        (state(llama_state=b"", llama_state_size=0), "is damaged"),
        (state(llama_state_size=len(data) + 4096), "is damaged: .* bytes and .* token ids, where it says"),
        (state(n_tokens=10**6), "is damaged"),
        (state(input_ids=saved.input_ids[:3]), "is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.load_state(wrong)
    for other in (tiny("llama", seed=5), tiny("qwen2"), tiny("llama", n_vocab=400)):
        with pytest.raises(ValueError, match="the state is that of another model than"):
            load(other, False).load_state(saved)
    longer = load(tiny("llama"), False, n_ctx=512)
    longer.eval((TOKENS * 3)[:300])
    with pytest.raises(ValueError, match="the state has 300 tokens; allowed: 256, the context"):
        llm.load_state(longer.save_state())
    with pytest.raises(TypeError, match="the state is a NoneType; allowed: what save_state"):
        llm.load_state(None)
    assert list(itertools.islice(llm.generate(TOKENS[:30], temp=0), 5)) == alone

    unsealed = state(llama_state=data[:500], llama_state_size=500)  # as from stock llama_cpp
    del unsealed.seal
    with pytest.raises(pypcd.PCDError, match="the state cannot be restored, and the context is empty now: "):
        llm.load_state(unsealed)
    assert llm.n_tokens == 0
    assert list(itertools.islice(llm.generate(TOKENS[:30], temp=0), 5)) == alone


# --- what users pass ---

BAD_GRAMMARS = {
    "open": "root ::= (",
    "no-root": 'x ::= "a"',
    "undefined": "root ::= y",
    "left-recursive": 'root ::= root "a" | "b"',
    "endless": 'root ::= ("")*',
}


@pytest.mark.parametrize("name", BAD_GRAMMARS)
def test_a_grammar_that_is_not_valid_is_an_error(name: str, tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        f"""
llm, grammar = new(), llama_cpp.LlamaGrammar.from_string({BAD_GRAMMARS[name]!r})
said(lambda: llm("abc", max_tokens=3, grammar=grammar)); llm.eval([5]); said(lambda: llm.sample(grammar=grammar))
good = llama_cpp.LlamaGrammar.from_string('root ::= "a"'); print(llm("abc", max_tokens=3, grammar=good)["choices"][0]["text"])""",
        stderr="(?s)(parse: error parsing grammar: .*)?",  # printed by llama.cpp itself
    )
    assert all(line.startswith("ValueError: the grammar is not valid: ") for line in lines[:2]), lines
    assert lines[2:] == ["a"]


def test_a_grammar_of_another_type_is_an_error(tiny: Tiny, load: Load) -> None:
    with pytest.raises(TypeError, match="grammar is a str; allowed: LlamaGrammar.from_string"):
        load(tiny("llama"), False)("abc", grammar='root ::= "a"')


def test_a_logits_processors_exception_arrives(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    alone = llm("abc", max_tokens=5, temperature=0)["choices"][0]["text"]

    def fails(tokens: Any, scores: Any) -> Any:
        raise KeyError("mine")

    for processor, error, message in (
        (fails, KeyError, "mine"),
        (lambda tokens, scores: scores[:5], ValueError, r"returned the shape \(5,\); allowed: \(384,\)"),
        (lambda tokens, scores: None, ValueError, r"returned the shape \(\)"),
        (lambda tokens, scores: np.full_like(scores, -np.inf), ValueError, "left no token that is possible"),
        (lambda tokens, scores: np.full_like(scores, np.nan), ValueError, "left NaN"),
    ):
        with pytest.raises(error, match=message):
            llm("abc", max_tokens=5, logits_processor=llama_cpp.LogitsProcessorList([processor]))
        with pytest.raises(error, match=message):
            llm.sample(logits_processor=llama_cpp.LogitsProcessorList([processor]))
        assert llm("abc", max_tokens=5, temperature=0)["choices"][0]["text"] == alone
    one = np.full(384, -np.inf, np.float32)
    one[300] = 0
    only = llama_cpp.LogitsProcessorList([lambda tokens, scores: one.tolist()])
    assert list(itertools.islice(llm.generate([1, 2], temp=0, logits_processor=only), 3)) == [300] * 3


def test_tokens_that_the_vocabulary_does_not_have_are_an_error(tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        """
llm = new(); tokenizer = llm.tokenizer()
for use in (lambda: llm.detokenize([5, 10**6]), lambda: llm.detokenize([-1]), lambda: tokenizer.decode([384]),
            lambda: llm._model.token_get_text(10**6), lambda: llm.detokenize([2**40 + 5])): said(use)
print(llm.detokenize([]), llm.detokenize(np.array([300, 301])) == llm.detokenize([300, 301]))""",
    )
    assert [line.split(";")[0] for line in lines[:5]] == [
        f"ValueError: token {token} is not in the vocabulary" for token in (10**6, -1, 384, 10**6, 2**40 + 5)
    ]
    assert lines[5] == "b'' True"


def test_a_text_without_tokens_is_not_embedded_beside_the_memory_of_the_batch(tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        """
llm = new(embedding=True); texts = llm.embed(["abc", "abcd"])
class NoTokens:
    def tokenize(self, *args, **kwargs): return []
llm.tokenizer_ = NoTokens()
said(lambda: llm.embed("x")); said(lambda: llm._batch.set_batch([], 0, False)); said(lambda: llm._batch.set_batch([5] * 65, 0, False))
llm.tokenizer_ = llm.tokenizer(); print(np.allclose(llm.embed(["abc", "abcd"])[0], texts[0]))""",
    )
    assert all(line.startswith("ValueError: there are no tokens to evaluate") for line in lines[:2])
    assert lines[2:] == ["ValueError: a batch of 65 tokens; allowed: 64, which is this model's n_batch", "True"]
