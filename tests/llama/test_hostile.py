"""Wrong input ends in the right exception with a helpful message, and nothing crashes or silently decodes without PCD: settings,
files, models, calls; and saved states, grammars, processors and tokens, which llama.cpp takes unseen, are checked before they end
the process, or an answer."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, check_rows, follow, native_row, run_python
from own_process import run
from tiny_gguf import CHAT_TEMPLATE

import pypcd


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (1, "pcd=1 is of the type int; allowed: bool, text such as 'unsure' .*, a mapping, PCDConfig"),
        ({"betta": 1}, "no field 'betta'.*'beta'"),
    ],
)
def test_a_bad_pcd_argument_is_refused_wherever_it_is_given(value: Any, message: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), {"beta": 2})
    before = llm.pcd
    for use in (
        lambda: load(tiny("llama"), value),
        lambda: llm("a", pcd=value),
        lambda: llm("a", stream=True, pcd=value),
        lambda: llm.create_chat_completion([{"role": "user", "content": "x"}], pcd=value),
        lambda: next(llm.generate([1, 2], pcd=value)),
        lambda: setattr(llm, "pcd", value),
    ):
        with pytest.raises(TypeError, match=message):
            use()
        assert llm.pcd == before
    follow(llm, tiny("llama"), TOKENS, 30)


# --- texts ---


@pytest.mark.parametrize("pre", ["gpt-4o", "tekken", "exaone-moe", "llama-bpe"])
def test_a_long_run_of_one_class_is_tokenized_or_refused(pre: str, tiny: Tiny) -> None:
    """llama.cpp splits by std::regex, which calls itself for each character. This vocabulary has two of a letter or sign as one token."""
    code = """
llm = new()
for one in "aZ!":
    print(len(llm.tokenize(one.encode() * 100_000, False)))
print(len(llm.tokenize("\u5b57".encode() * 70_000, False)), len(llm.tokenize(b" " * 70_000 + b"a", False)))
print(llm.tokenize(b" ab?" * 300_000, False) == llm.tokenize(b" ab?", False) * 300_000)
said(lambda: llm.tokenize(b"a" * (2 ** 20 + 1)))
"""
    *runs, other, words, refusal = run(tiny("llama", pre=pre), code)
    assert runs == ["50000"] * 3 and other == "210000 70001" and words == "True"
    assert refusal.startswith(
        "InputError: of the text, 1048577 bytes in a row are one word to this model's tokenizer; allowed:"
    )


# --- files ---


def test_a_file_that_is_no_model_is_a_clear_error(tmp_path: Path, tiny: Tiny) -> None:
    data = tiny("llama").read_bytes()
    at = data.index(b"llama", data.index(b"general.architecture"))
    bad = {
        "empty": b"",
        "text": b"This is not a model.",
        "magic-only": b"GGUF",
        "header": data[:200],
        "no-weights": data[: len(data) // 2],
        "version": data[:4] + b"\xff\xff\xff\x7f" + data[8:],
        "zeros": data[:8] + bytes(4000),
        "counts": data[:8] + b"\xff" * 16 + data[24:],
        "nosuc": data[:at] + b"nosuc" + data[at + 5 :],  # the architecture
    }
    for name, content in bad.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    (tmp_path / "folder").mkdir()
    wanted: dict[Path, tuple[type[Exception], str]] = {
        **{tmp_path / f"{name}.gguf": (pypcd.ModelError, name) for name in bad},
        tmp_path / "no-weights.gguf": (pypcd.ModelError, "the file is incomplete or damaged, download it again"),
        tmp_path / "version.gguf": (pypcd.ModelError, "the file is damaged, download it again, or of a newer GGUF"),
        tmp_path / "folder": (pypcd.ModelError, "is a folder"),
        tmp_path: (pypcd.ModelError, r"is a folder.*it holds counts\.gguf"),
        tmp_path / "no" / "where.gguf": (FileNotFoundError, "where.gguf"),
    }
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.gguf")
        wanted[tmp_path / "pipe.gguf"] = pypcd.ModelError, "is a pipe, not a GGUF file"
    for path, (error, message) in wanted.items():
        with pytest.raises(error, match=message) as caught:
            pypcd.Llama(path)
        assert "\n" not in str(caught.value)


# --- models and contexts that cannot run it ---


@pytest.mark.parametrize(
    ("arch", "setting", "kwargs", "message"),
    [
        ("gpt2", {}, {}, "'gpt2' has no rotary positions.*perturbation=\"none\" with a window"),
        ("mamba", {"perturbation": "none", "window": 8}, {}, "'mamba' has recurrent"),
        ("llama", {}, {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_MEAN}, "pools embeddings"),
        ("llama", {}, {"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}, "not causal"),
    ],
)
def test_what_cannot_run_pcd_says_why_and_still_runs_without(
    arch: str, setting: dict[str, Any], kwargs: dict[str, Any], message: str, tiny: Tiny, load: Load
) -> None:
    with pytest.raises(pypcd.UnsupportedError, match=message):
        load(tiny(arch), setting, **kwargs)
    llm = load(tiny(arch), False, **kwargs)
    for ask in (llm.check_pcd, lambda setting: setattr(llm, "pcd", setting)):  # what shows in a graph alone, too
        with pytest.raises(pypcd.UnsupportedError, match=message):
            ask(pypcd.PCDConfig(**setting))
    assert llm.pcd is None
    if not kwargs:
        assert len(list(zip(range(3), llm.generate(TOKENS[:10], temp=0)))) == 3


# --- calls ---


@pytest.mark.parametrize("pcd", [False, {}])
def test_more_tokens_than_the_context_are_refused_before_any_is_evaluated(pcd: Any, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), pcd, n_ctx=256, n_batch=16)
    with pytest.raises(ValueError, match="257 more tokens after 0 exceed the context of 256"):
        llm.eval([5] * 257)
    assert llm.n_tokens == 0
    llm.eval(TOKENS)
    with pytest.raises(ValueError, match="137 more tokens after 120 exceed the context of 256"):
        llm.eval([5] * 137)
    with pytest.raises(ValueError, match="exceed context window of 256"):
        llm("word " * 300)
    assert llm.n_tokens == 120
    llm.eval(TOKENS[:1])
    if llm.pcd:
        check_rows(llm, tiny("llama"), TOKENS + TOKENS[:1])


def test_odd_calls_with_pcd_on_end_well(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper")
    llm.eval([])
    with pytest.raises(pypcd.PCDError, match="evaluate tokens first"):
        llm.pcd_logits()
    assert isinstance(llm("", max_tokens=3, temperature=0)["choices"][0]["text"], str)
    assert llm.input_ids[0] == llm.token_bos()
    with pytest.raises(RuntimeError, match="llama_decode"):
        llm.eval([10**6])  # no such token
    llm.reset()
    follow(llm, tiny("llama"), TOKENS, 30)
    for row in (30, 28, -2, 2**31 - 1, -(2**31)):
        with pytest.raises(pypcd.PCDError, match=f"row {row}: .*evaluate tokens first"):
            llm.pcd_logits(row)
    with pytest.raises(RuntimeError, match="embedding=True"):
        llm.embed("x")
    assert llm.pcd is not None
    llm.pcd = False
    llm.pcd_logits()  # still those of the last evaluation
    llm.eval([4])
    for llm.pcd in (False, True):
        with pytest.raises(pypcd.PCDError, match="evaluate tokens first, with pcd=True"):
            llm.pcd_logits()


@pytest.mark.parametrize(
    ("n_ctx", "message"),
    [*((n, "; allowed: an integer") for n in (-5, 2**31, 2**40, 1.5, "'x'")), (2 * 10**9, ".* GiB, but this")],
)
def test_a_context_out_of_range_is_an_error_at_once(n_ctx: Any, message: str, tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=f"n_ctx is {n_ctx}{message}"):
        pypcd.Llama("demo" if "GiB" in message else tiny("llama"), n_ctx="x" if n_ctx == "'x'" else n_ctx)  # type: ignore[arg-type]


def test_a_context_beyond_learned_positions_is_refused(tiny: Tiny, load: Load) -> None:
    """llama.cpp would end the process at the first token behind them."""
    path = tiny("gpt2", n_ctx_train=512)
    with pytest.raises(ValueError, match="n_ctx is 1024, but this model has learned its positions, 512 of them"):
        pypcd.Llama(path, n_ctx=1024)
    assert load(path, False, n_ctx=400).n_ctx() == 512
    llm = load(path, False, n_ctx=1024, n_seq_max=2)  # two texts share it
    llm.eval((TOKENS * 6)[:512])


def test_a_context_that_is_no_multiple_of_256_is_usable_to_its_end(tiny: Tiny) -> None:
    llm = pypcd.Llama(tiny("llama"), pcd="paper", n_ctx=300, n_threads=1, n_threads_batch=1)
    assert llm.n_ctx() == 512 <= len(llm.input_ids)
    llm.eval((TOKENS * 6)[:512])
    assert llm.n_tokens == 512


@pytest.mark.parametrize(
    ("name", "nearest"), [("n_cxt", "n_ctx"), ("pdc", "pcd"), ("use_extra_buft", "use_extra_bufts"), ("f16_kv", "")]
)
def test_an_unknown_argument_is_an_error_not_dropped(name: str, nearest: str, tiny: Tiny) -> None:
    with pytest.raises(TypeError, match=f"Llama has no argument '{name}'.*{nearest}"):
        pypcd.Llama(tiny("llama"), **{name: False})
    if name == "f16_kv":  # llama_cpp dropped some long ago; they are taken unless they ask for something
        pypcd.Llama(tiny("llama"), n_ctx=256, mul_mat_q=True, n_parts=-1, f16_kv=True).close()


def test_a_model_that_failed_to_open_can_be_closed_and_collected() -> None:
    llm = object.__new__(pypcd.Llama)
    llm.close()
    with pytest.raises(FileNotFoundError):
        pypcd.Llama("nowhere.gguf", pcd="paper")


@pytest.mark.parametrize("value", ["yes", "0"])
def test_disabled_by_the_environment_it_warns_and_decodes_plainly(value: str, tiny: Tiny) -> None:
    code = """if True:
        import itertools, sys, pypcd
        def run(pcd):
            llm = pypcd.Llama(sys.argv[1], pcd=pcd, n_ctx=256, n_threads=1)
            return llm.pcd, list(itertools.islice(llm.generate(list(range(5, 30)), temp=0), 8))
        (pcd, made), plain = run("paper"), run(False)
        print(pcd is None, (None, made) == plain)"""
    done = run_python(code, tiny("llama"), PYPCD_DISABLE=value)
    assert done.stdout == ("False False\n" if value == "0" else "True True\n"), done.stderr
    assert ("PCD stays off: PYPCD_DISABLE is set" in done.stderr) == (value != "0")


# --- states ---


@pytest.mark.parametrize("pcd", [False, {"cache": "separate"}, "unsure"], ids=str)
def test_a_restored_state_goes_on_and_has_no_logits_of_its_own(pcd: Any, tiny: Tiny, load: Load) -> None:
    llm, other = load(tiny("llama"), pcd), load(tiny("llama"), pcd, n_ctx=512, n_batch=32)
    llm.eval(TOKENS[:40])
    state = pickle.loads(pickle.dumps(llm.save_state()))
    wanted = list(itertools.islice(llm.generate(TOKENS[:40], temp=0), 8))
    other.eval([9, 8, 7])
    other.load_state(state)
    with pytest.raises(pypcd.PCDError, match="evaluate tokens first"):
        other.pcd_logits()
    for use in (lambda: other.sample(), lambda: next(other.generate([], reset=False))):
        with pytest.raises(pypcd.PCDError, match="evaluate tokens first, also after load_state"):
            use()
    assert list(itertools.islice(other.generate(TOKENS[:40], temp=0), 8)) == wanted
    other.load_state(state)
    other.eval(TOKENS[40:50])
    llm.reset(), llm.eval(TOKENS[:50])
    assert other.sample(temp=0.0) == llm.sample(temp=0.0)


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
    bad = ["root ::= (", 'x ::= "a"', 'root ::= root "a" | "b"']
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
    assert len(lines) == 8 and lines[-1] == "a"
    assert all(line.startswith("InputError: the grammar is not valid: ") for line in lines[:6]), lines
    assert re.match("ArgumentError: grammar is a str; allowed: LlamaGrammar", lines[6])


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
    ({"n_seq_max": 65, "n_batch": 64}, "n_seq_max is 65, and n_batch 64; allowed: n_seq_max of at most n_batch"),
    ({"n_threads": 100000}, "n_threads is 100000; allowed: an integer from -1 to 512"),
    ({"type_k": 999}, "type_k is 999; allowed for heads of 8 values: 0 .f32., 1 .f16., 30 .bf16., or None"),
    ({"type_k": 8}, "type_k is 8; allowed for heads of 8 values: 0 .f32., 1 .f16., 30 .bf16., or None"),
    ({"type_v": 2, "flash_attn": True}, "type_v is 2; allowed for heads of 8 values"),
]


def test_values_at_which_llama_cpp_ends_the_process_are_errors_at_the_opening(tiny: Tiny) -> None:
    tries = [f"said(lambda: new(**{kwargs!r})('abc', max_tokens=2))" for kwargs, _ in OPENING]
    *lines, other = run(tiny("llama", n_head=8), "\n".join([*tries, "print(new(type_k=30, type_v=0).eval([1, 2, 3]))"]))
    for line, (kwargs, message) in zip(lines, OPENING, strict=True):
        assert re.match(f"InputError: {message}", line), (kwargs, line)
    assert other == "None"


def test_a_form_of_answers_without_a_schema_is_an_error(tiny: Tiny, load: Load) -> None:
    given: Any = {"type": "json_schema", "json_schema": {"name": "x"}}
    llm = load(tiny("llama", chat_template=CHAT_TEMPLATE), False)
    with pytest.raises(ValueError, match=r"response_format is .*; allowed"):
        llm.create_chat_completion([{"role": "user", "content": "abc"}], response_format=given)
