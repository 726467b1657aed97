"""Saved states, grammars, processors, tokens: what llama.cpp takes unseen is checked before it ends the process, or an answer."""

from __future__ import annotations

import itertools
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Callable

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
    for use in (
        lambda: llm.sample(),
        lambda: next(llm.generate([])),
        lambda: next(llm.generate([], reset=False)),
        lambda: llm.eval([]) or llm.sample(),
    ):
        with pytest.raises(pypcd.PCDError, match=r"no logits to sample from \(0 tokens.*evaluate tokens first"):
            use()
    llm.eval(TOKENS[:30])
    with pytest.raises(pypcd.PCDError, match=r"\(30 tokens, idx=5\): only the last token has some"):
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
        (state(n_tokens=-5), "is damaged"),
        (state(input_ids=saved.input_ids + (np.arange(len(saved.input_ids)) == 3)), "is damaged"),
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
for use in (lambda: llm.detokenize([5, 10**6]), lambda: llm.detokenize([-1]), lambda: tokenizer.decode([384]),
            lambda: llm._model.token_get_text(10**6), lambda: llm.detokenize([2**40 + 5])): said(use)
print(llm.detokenize([]), llm.detokenize(np.array([300, 301])) == llm.detokenize([300, 301]))""",
    )
    assert [line.split(";")[0] for line in lines[:5]] == [
        f"InputError: token {token} is not in the vocabulary" for token in (10**6, -1, 384, 10**6, 2**40 + 5)
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
    assert all(line.startswith("InputError: there are no tokens to evaluate") for line in lines[:2])
    assert lines[2:] == ["InputError: a batch of 65 tokens; allowed: 64, which is this model's n_batch", "True"]


OPENING: list[tuple[dict[str, Any], str]] = [
    ({"n_batch": -5}, "n_batch is -5; allowed: an integer of at least 1"),
    ({"n_batch": 0}, "n_batch is 0; allowed"),
    ({"n_seq_max": 65, "n_batch": 64}, "n_seq_max is 65, and n_batch 64; allowed: n_seq_max of at most n_batch"),
    ({"n_ubatch": -1}, "n_ubatch is -1; allowed: an integer of at least 0"),
    ({"n_threads": 100000}, "n_threads is 100000; allowed: an integer from -1 to 512"),
    ({"n_threads_batch": 513}, "n_threads_batch is 513; allowed"),
    ({"type_k": 999}, "type_k is 999; allowed: 0 .f32., 1 .f16."),
    ({"type_k": 26}, "type_k is 26; allowed"),
    ({"type_k": 16}, "type_k is 16; allowed"),
    ({"type_v": 16, "flash_attn": True}, "type_v is 16; allowed"),
    ({"embedding": True, "pooling_type": 77}, "pooling_type is 77; allowed: an integer from -1 to 4"),
    ({"lora_scale": float("nan")}, "lora_scale is nan"),
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
        "\n".join(f"said(lambda: new(**{kwargs!r})('abc', max_tokens=2))" for kwargs, _ in OPENING).replace(
            "nan}", "float('nan')}"
        ),
    )
    for line, (kwargs, message) in zip(lines, OPENING):
        assert re.match(f"InputError: {message}", line), (kwargs, line)
    assert len(lines) == len(OPENING)


def test_a_bias_or_a_stop_that_llama_cpp_would_misread_is_an_error(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    for bias in ({384: 1.0}, {-1: 1.0}, {"5000": 1.0}):
        with pytest.raises(ValueError, match="logit_bias's token is .*; allowed: an integer from 0 to 383"):
            llm("abc", max_tokens=2, logit_bias=bias)
    with pytest.raises(ValueError, match="left NaN"):
        llm("abc", max_tokens=2, logit_bias={5: float("nan")})
    for stop in ("", ["x", ""]):
        with pytest.raises(ValueError, match="allowed: texts that are not empty"):
            llm("abc", max_tokens=2, stop=stop)
        with pytest.raises(ValueError, match="allowed: texts that are not empty"):
            llm("abc", None, 2, 0.8, 0.95, 0.05, 1.0, None, False, stop)
    assert llm("abc", max_tokens=2, stop=None)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "given",
    ["json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}],
)
def test_a_form_of_answers_that_llama_cpp_would_pass_over_is_an_error(given: Any, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama", chat_template=CHAT_TEMPLATE), False)
    with pytest.raises(ValueError, match=r"response_format is .*; allowed"):
        llm.create_chat_completion([{"role": "user", "content": "abc"}], response_format=given)


def test_a_bias_and_a_processor_both_count(tiny: Tiny, load: Load) -> None:
    """llama_cpp drops both where both are given, and writes into the caller's list."""
    llm, seen = load(tiny("llama"), False), []

    def processor(tokens: Any, scores: Any) -> Any:
        seen.append(len(tokens))
        return scores

    processors = llama_cpp.LogitsProcessorList([processor])
    one = llm("abc", max_tokens=3, temperature=0, logit_bias={300: 1000.0}, logits_processor=processors)
    assert one["choices"][0]["text"] == llm.detokenize([300] * 3).decode()
    assert len(seen) == 3 and len(processors) == 1


def test_latent_keys_in_blocks_are_not_moved(tiny: Tiny) -> None:
    """llama.cpp says that it can, and ends the process at the next evaluation."""
    lines = run(
        tiny("deepseek2"),
        """
from pypcd import engine
for kwargs in ({"type_k": 8, "type_v": 8, "flash_attn": True}, {}):
    llm = new(**kwargs); llm.eval(list(range(5, 40))); llm._ctx.kv_cache_seq_rm(0, 3, 6)
    print(engine.can_shift(llm)); said(lambda: llm._ctx.kv_cache_seq_shift(0, 6, -1, -3))
    if not kwargs:
        llm.n_tokens -= 3; llm.eval([5]); print(llm.n_tokens)""",
    )
    assert lines[0] == "False" and lines[1].startswith(
        "PCDError: the keys of this context are stored in blocks (type_k=8)"
    )
    assert lines[2:] == ["True", "returned None", "33"]
