"""pypcd.Llama: a context's rows are those of a fresh evaluation, whatever its history; every way to generate."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import logging
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import F32, TOKENS, Load, Tiny, check_rows, contrasted, expected, native_row, rounding
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_gguf import CHAT_TEMPLATE

import pypcd
from pypcd import UnsupportedError
from pypcd.decode import Session
from pypcd.settings.config import PRESETS

T = TOKENS
on_each_engine = pytest.mark.parametrize("engine", ["native", "stock"])

# --- history leaves no trace ---


configs = st.builds(
    pypcd.PCDConfig,
    cache=st.sampled_from(["rerotated", "rerotated", "shared"]),
    evaluation=st.sampled_from(["fused", "alternate"]),
    alpha=st.sampled_from([0.2, 0.2, 0.2, 0.5]),  # mostly the same table as before, whose keys are there
    base_ratio=st.sampled_from([1e-4, 1e-4, 1e-4, 0.01]),
    transition=st.sampled_from(["exponential", "exponential", "none"]),
    beta=st.sampled_from([2.5, 0.5]),
    gamma=st.sampled_from([30, 3, 2, 1]),
    window=st.sampled_from([None, None, 6]),
    n_sink=st.sampled_from([4, 4, 9]),
)
settings_of_pcd = st.one_of(
    configs,
    configs,
    configs,
    st.sampled_from(
        [
            False,
            "paper",
            pypcd.PCDConfig(perturbation="none", window=9, n_sink=2),
            pypcd.PCDConfig(cache="shared", base_ratio=0.1),
        ]
    ),
)
actions = st.one_of(
    st.none(),
    st.tuples(st.just("set"), settings_of_pcd),
    st.tuples(st.just("set"), settings_of_pcd),
    st.tuples(st.just("truncate"), st.integers(0, 60)),
    st.tuples(st.sampled_from(["reset", "save", "load", "load"]), st.none()),
)
# at each step a change or none, then tokens: one, as when generating, or a prompt
steps = st.lists(st.tuples(actions, st.sampled_from([1, 1, 1, 9, 30])), min_size=5, max_size=10)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["llama", "qwen2vl", "stablelm"]),
    st.sampled_from([(64, 64), (7, 7), (32, 8)]),
    st.booleans(),
    steps,
    st.randoms(),
)
def test_no_interleaving_of_steps_leaves_a_trace(
    tiny: Tiny, arch: str, batches: tuple[int, int], logits_all: bool, steps: list[tuple[Any, int]], random: Any
) -> None:
    path, saved = tiny(arch), None
    held: list[int] = []
    llm = pypcd.Llama(
        path,
        pcd="paper",
        n_ctx=512,
        n_batch=batches[0],
        n_ubatch=batches[1],
        n_threads=1,
        n_threads_batch=1,
        n_gpu_layers=0,
        flash_attn=False,
        logits_all=logits_all,
        **F32,
    )
    with contextlib.closing(llm):
        for action, n in [*steps, (("set", "paper"), 1)]:
            what, value = action or ("nothing", None)
            if what == "set":
                llm.pcd = value
            elif what == "truncate" or len(held) > 80:  # the reference takes its time on long texts
                held = held[: value or 20]
                llm.n_tokens = len(held)
            elif what == "reset":
                llm.reset()
                held = []
            elif what == "save":
                saved = (llm.save_state(), held)
            elif what == "load" and saved:
                llm.load_state(saved[0])
                held = saved[1]
            more = [random.randrange(3, 384) for _ in range(n)]
            llm.eval(more)
            held = [*held, *more]
            if llm.pcd and llm.pcd.gamma > 1:
                check_rows(llm, path, held, moved=0.0)
            else:
                plain = native_row(llm)
                assert plain.argmax() == expected(path, held, len(held) - 1, pypcd.PCDConfig())[0].argmax()
                assert (plain.min() < plain.max() - 55) == (llm.pcd is not None)


# --- generating ---


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def evaluated(llm: pypcd.Llama) -> list[int]:
    """The prompt and all generated tokens except the last."""
    return llm.input_ids[: llm.n_tokens].tolist()


PROMPT = "the first words of a prompt"


@on_each_engine
def test_every_way_to_generate_takes_pcd_for_one_call(
    engine: str, tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    openais = types.SimpleNamespace(ChatCompletion=dict, ChatCompletionChunk=dict)
    for name in ("openai", "openai.types", "openai.types.chat"):
        monkeypatch.setitem(sys.modules, name, openais)  # type: ignore[arg-type]
    path = tiny("llama", chat_template=CHAT_TEMPLATE)
    llm, on, off = (load(path, pcd, engine=engine) for pcd in (False, {"beta": 1.5}, False))
    messages, few = [{"role": "user", "content": "hello there"}], {"max_tokens": 16, "temperature": 0}
    ways: list[Callable[..., Any]] = [
        lambda m, **k: m(PROMPT, **few, **k) and evaluated(m),
        lambda m, **k: m.create_completion(PROMPT, **few, **k) and evaluated(m),
        lambda m, **k: list(m(PROMPT, stream=True, **few, **k)) and evaluated(m),
        lambda m, **k: m.create_chat_completion(messages, **few, **k) and evaluated(m),
        lambda m, **k: list(m.create_chat_completion(messages, stream=True, **few, **k)) and evaluated(m),
        lambda m, **k: m.create_chat_completion_openai_v1(messages=messages, **few, **k) and evaluated(m),
        lambda m, **k: (
            list(m.create_chat_completion_openai_v1(messages=messages, stream=True, **few, **k)) and evaluated(m)
        ),
        lambda m, **k: list(itertools.islice(m.generate(T[:20], temp=0, **k), 16)),
    ]
    for way in ways:
        contrasted, plain = way(on), way(off)
        assert contrasted != plain
        assert way(llm, pcd="paper:beta=1.5") == contrasted  # off, on for a call, ...
        assert llm.pcd is None and way(llm) == plain  # ... and off after it
        assert way(on, pcd=False) == plain
        assert on.pcd == pypcd.PCDConfig(beta=1.5) and way(on) == contrasted


def test_the_setting_is_restored_when_a_call_fails_or_a_stream_is_abandoned(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), {"beta": 0.5})
    before = llm.pcd
    stream = llm(PROMPT, max_tokens=20, stream=True, pcd={"beta": 9})
    next(stream)
    assert llm.pcd is before  # the setting holds in a step, not between two
    assert next(stream)
    stream.close()
    assert llm.pcd is before
    with pytest.raises(ValueError, match="exceed context window"):
        llm("long " * 500, pcd=False)
    assert llm.pcd is before
    with pytest.raises(ValueError, match="beta is -1"):
        llm(PROMPT, stream=True, pcd={"beta": -1})
    assert llm.pcd is before
    stream = llm(PROMPT, max_tokens=9, stream=True, pcd={"beta": 1})
    next(stream)
    llm.pcd = {"gamma": 7}
    stream.close()
    assert llm.pcd == before.replace(gamma=7), "what was assigned meanwhile stays"


@pytest.mark.parametrize(
    ("arch", "pcd", "engine"),
    [
        ("llama", "paper", "native"),
        ("llama", "paper", "stock"),
        ("lfm2", "window:window=8", "native"),
        ("mamba", False, "native"),
    ],
)
def test_a_repeated_prompt_reuses_its_prefix_and_gives_the_same_tokens(
    arch: str, pcd: Any, engine: str, tiny: Tiny, load: Load
) -> None:
    llm = load(tiny(arch), pcd, engine=engine)
    fresh = list(itertools.islice(llm.generate(T[:60], temp=0), 12))
    for before in ([T[:60]], [T[:30] + T[70:90]], [T[:60] + [9, 9]], [T[90:100]]):
        list(itertools.islice(llm.generate(before[0], temp=0), 3))
        assert list(itertools.islice(llm.generate(T[:60], temp=0), 12)) == fresh
    llm.eval(T[:3])
    llm.reset()
    for setting in (False, {"beta": 0.3}) if arch == "llama" else ():  # the logits at hand were made under another one
        other = list(itertools.islice(load(tiny("llama"), setting, engine=engine).generate(T[:60], temp=0), 12))
        assert other != fresh
        list(itertools.islice(llm.generate(T[:60], temp=0), 1))
        assert list(itertools.islice(llm.generate(T[:60], temp=0, pcd=setting), 12)) == other
        assert list(itertools.islice(llm.generate(T[:60], temp=0), 12)) == fresh


@pytest.mark.parametrize(("arch", "settings"), [("llama", (None, False, {"alpha": 0.5})), ("mamba", (None,))])
def test_a_ram_cache_gives_the_answers_of_an_uncached_model(arch: str, settings: Any, tiny: Tiny, load: Load) -> None:
    llm, fresh = (load(tiny(arch), "paper" if arch == "llama" else False) for _ in range(2))
    llm.set_cache(llama_cpp.LlamaRAMCache())
    for prompt in (PROMPT, "another prompt, quite unlike it", PROMPT, PROMPT + " and more", "another prompt"):
        for setting in settings:
            fresh.reset()
            fresh._ctx.kv_cache_clear()
            assert text_of(llm(prompt, max_tokens=10, temperature=0, pcd=setting)) == text_of(
                fresh(prompt, max_tokens=10, temperature=0, pcd=setting)
            )


settings_of_all_kinds = pytest.mark.parametrize(
    "setting",
    [
        *(f"{name}:min_context=0" for name in PRESETS),
        "paper:gamma=1",
        "paper:gamma=2",
        "paper:evaluation=alternate:gamma=3",
    ],
)


@settings_of_all_kinds
def test_a_grammar_beats_the_plausibility_cut(setting: str, tiny: Tiny, load: Load) -> None:
    """A grammar's tokens need not be among the best gamma; they are still found, in the order of L."""
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("7" | "x") "-" [0-9] [0-9] [0-9] "!"', verbose=False)
    answer = load(tiny("llama"))(PROMPT, max_tokens=30, temperature=2, grammar=grammar, pcd=setting)
    assert re.fullmatch(r"[7x]-\d{3}!", text_of(answer)), text_of(answer)


@settings_of_all_kinds
@on_each_engine
def test_a_logit_bias_of_100_reaches_every_token(engine: str, setting: str, tiny: Tiny, load: Load) -> None:
    """-100 forbids the best token, also where no other one is plausible; +100 picks a token that is not plausible."""
    llm = load(tiny("llama"), setting, engine=engine)

    def answered(bias: dict[int, float]) -> tuple[int, pypcd.PCDLogits]:
        llm(PROMPT, max_tokens=2, temperature=0, logit_bias={str(token): value for token, value in bias.items()})
        n_prompt = len(llm.tokenize(PROMPT.encode()))
        token = int(llm.input_ids[n_prompt])
        llm.reset()
        llm.eval(llm.tokenize(PROMPT.encode()))
        return token, llm.pcd_logits()

    best, rows = answered({})
    assert best == rows.contrasted.argmax()
    order = np.argsort(-rows.standard, kind="stable")
    plausible = np.flatnonzero(np.isfinite(rows.contrasted))
    rest = [int(token) for token in order if token not in plausible and token > 2]
    after = (
        np.where(np.arange(llm.n_vocab()) == best, -np.inf, rows.contrasted).argmax() if len(plausible) > 1 else rest[0]
    )
    assert answered({best: -100})[0] == after
    assert answered({int(token): -100 for token in plausible})[0] == rest[0]
    for pair in ((rest[0], rest[1]), (rest[-1], rest[-2]), (rest[10], rest[-1])):
        assert answered(dict.fromkeys(pair, 100))[0] == max(pair, key=lambda token: rows.standard[token])


@on_each_engine
def test_logprobs_are_those_of_the_contrasted_distribution(engine: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper", logits_all=True, engine=engine)
    answer = llm(PROMPT, max_tokens=6, temperature=0, logprobs=2)["choices"][0]["logprobs"]
    prompt = llm.tokenize(PROMPT.encode())
    tokens = evaluated(llm)
    llm.reset()
    llm.eval(tokens)
    limit = contrasted(2 * rounding(tiny("llama")), llm.pcd.beta)  # a log-softmax of the contrasted row
    for k, (logprob, top) in enumerate(zip(answer["token_logprobs"], answer["top_logprobs"])):
        row = llm.pcd_logits(len(prompt) - 1 + k).contrasted.astype(np.float64)
        best = -np.log(np.exp(row - row.max()).sum())
        assert logprob == pytest.approx(best, abs=limit) == max(top.values())


def test_an_embedding_context_embeds_as_ever_and_generates_with_pcd(tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    plain, llm = load(path, False, embedding=True), load(path, "paper", embedding=True)
    for text in ("some words", ["two", "inputs of several words"]):
        assert llm.embed(text) == plain.embed(text)
        assert llm.pcd is not None
    assert llm.create_embedding("abc")["data"] == plain.create_embedding("abc")["data"]
    expected_tokens = list(itertools.islice(load(path, "paper").generate(T[:30], temp=0), 10))
    assert list(itertools.islice(llm.generate(T[:30], temp=0), 10)) == expected_tokens
    assert llm.embed("some words") == plain.embed("some words")
    llm.reset()
    llm.eval(T[:30])
    check_rows(llm, path, T[:30])


# --- the object ---


def test_from_pretrained_passes_pcd_on(hub: None) -> None:
    llm = pypcd.Llama.from_pretrained("someone/something", "*.gguf", pcd="paper:beta=2", n_ctx=256)
    with contextlib.closing(llm):
        assert isinstance(llm, pypcd.Llama) and llm.pcd == pypcd.PCDConfig(beta=2) and llm.n_ctx() == 256


def test_the_defaults_are_as_the_signature_and_the_docstring_say(tiny: Tiny) -> None:
    shown, text = inspect.signature(pypcd.Llama).parameters, inspect.getdoc(pypcd.Llama) or ""
    with contextlib.closing(pypcd.Llama(tiny("llama"))) as llm:
        assert llm.pcd is None
        assert shown["verbose"].default is False and llm.verbose is False
        assert shown["n_ctx"].default is None and "None or 0: the model's own context" in text and llm.n_ctx() == 1024
        layers = llm.model_params.n_gpu_layers
    with contextlib.closing(pypcd.Llama(tiny("llama"), n_ctx=0, n_gpu_layers=None, flash_attn=None)) as llm:
        assert llm.n_ctx() == 1024 and llm.model_params.n_gpu_layers == layers


def test_stats_count_what_was_done(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), {"cache": "shared"}, n_batch=16)
    assert llm.pcd_stats().second_bytes == 0
    llm.eval(T[:50])  # four batches, of which only the last one's row can be read
    assert (llm.pcd_stats().n_tokens, llm.pcd_stats().n_twins, llm.pcd_stats().n_derived) == (1, 1, 0)
    llm.pcd = {"cache": "rerotated"}
    llm.eval(T[50:51])
    stats = llm.pcd_stats()
    assert (stats.n_tokens, stats.n_twins, stats.n_derived) == (2, 2, 1)
    assert stats.second_bytes >= 3 * 256 * 32 * 4  # layers, cells, two heads of 16, float32
    llm.reset()
    list(itertools.islice(llm.generate(T[:30], temp=0, pcd={"beta": 1}), 10))
    assert llm.pcd_stats().n_derived == 1, "a step of a stream costs no second keys"


def test_a_decoder_that_waits_for_an_encoder_is_refused(tiny: Tiny, load: Load) -> None:
    """llama.cpp would end the process."""
    llm = load(tiny("t5"), False)
    for attempt in (lambda: llm.eval([1, 2]), lambda: llm("x", max_tokens=1), lambda: Session(llm)):
        with pytest.raises(UnsupportedError, match="architecture 't5' has an encoder"):
            attempt()


@pytest.mark.parametrize(
    "template", ["{% for m in messages %}{{ m.content }", "{{ messages | no_such_filter }}", "{{" + "(" * 2000]
)
def test_a_broken_chat_template_ends_chats_alone(template: str, tiny: Tiny, load: Load) -> None:
    whole, broken = (load(tiny("llama", chat_template=text), False) for text in (CHAT_TEMPLATE, template))
    asked: Any = {"max_tokens": 8, "temperature": 0.0}
    assert broken("ab", **asked)["choices"] == whole("ab", **asked)["choices"]
    messages: Any = [{"role": "user", "content": "ab"}]
    for ask in (lambda: broken.create_chat_completion(messages, **asked), lambda: broken.ask(question="ab")):
        with pytest.raises(
            (ValueError, pypcd.PCDError), match="^the model's chat template is broken: .*; without a template"
        ):
            ask()
    named: Any = {"chat_format": "chatml"}
    given = (load(tiny("llama", chat_template=text), False, **named) for text in (CHAT_TEMPLATE, template))
    answers = [llm.create_chat_completion(messages, **asked)["choices"] for llm in given]
    assert answers[0] == answers[1]


def test_a_broken_template_beside_the_chats_own_harms_nothing(tiny: Tiny, load: Load) -> None:
    named: Any = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tools", "template": "{{ x"}]
    messages: Any = [{"role": "user", "content": "ab"}]
    llms = [load(tiny("llama", chat_template=one), False) for one in (CHAT_TEMPLATE, named)]
    answers = [llm.create_chat_completion(messages, max_tokens=8, temperature=0.0)["choices"] for llm in llms]
    assert answers[0] == answers[1]


def test_repr_says_what_it_is(tmp_path):
    llm = pypcd.Llama("demo", n_ctx=256, pcd="paper:beta=1.5")
    assert re.fullmatch(r"<pypcd.Llama .+demo.gguf, n_ctx=256, pcd=paper:beta=1.5>", repr(llm))
    llm.pcd = False
    assert repr(llm).endswith("pcd=off>")
    llm.close()
    assert repr(llm).endswith("demo.gguf, closed>")


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"n_ctx": 2304}, True),
        ({"n_ctx": 4096, "n_seq_max": 2}, False),
        ({"n_ctx": 4096, "rope_freq_scale": 0.5}, False),
    ],
)
def test_a_context_beyond_what_the_model_was_trained_for_is_said(caplog, options, warns):
    with caplog.at_level(logging.WARNING, "pypcd"):
        pypcd.Llama("demo", **options).close()
    assert ("the model was trained for 2048" in caplog.text) is warns


@pytest.mark.parametrize(
    "setting",
    ["paper", "window:window=16:relative_top=0.5", "window:window=16:min_entropy=1.5", "paper:beta=0", False],
)
@pytest.mark.parametrize("temp", [0.0, 1.5])
@on_each_engine
def test_the_last_answer_is_counted_as_its_rows_say(engine, temp, setting):
    """Beside a loop that reads the rows of each step itself."""
    how = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "seed": 5}
    with pypcd.Llama("demo", pcd=setting, engine=engine, **how) as llm:
        assert llm.last_answer == pypcd.PCDAnswer()
        prompt = llm.tokenize(
            b'{"9c34-54c5": "8044-44b2", "1d2e-77a0": "5fa0-913c", "0b71-2c9d": "c1d8-3e05"}\nKey: "1d2e'
        )
        contrasted, skipped, changes = 0, 0, []
        tokens = []
        for token in llm.generate(prompt, temp=temp, top_k=0, top_p=1.0, min_p=0.0):
            if setting:
                rows = llm.pcd_logits()
                contrasted += rows.beta is not None
                skipped += rows.local is None
                plain, best = rows.standard.argmax(), rows.contrasted.argmax()
                assert temp or token == (plain if rows.beta is None else best)
                if rows.beta is not None and plain != best and token != plain:
                    changes.append((len(tokens), token, plain))
            tokens.append(token)
            if len(tokens) == 40:
                break
        made = llm.last_answer
        assert made.setting == llm.pcd and made.n_contrasted == contrasted and made.n_prompt == len(prompt)
        assert made.n_skipped == skipped and (skipped > 0 or "relative_top" not in str(setting))
        assert [(c.index, c.token, c.plain) for c in made.changes] == changes
        assert made.n_tokens == 40 and (setting in ("paper:beta=0", False) or contrasted)
        llm.create_completion("x", max_tokens=3, pcd="paper")
        assert llm.last_answer.setting == pypcd.PCDConfig() and llm.last_answer.n_tokens <= 3
        llm.create_completion("x", max_tokens=3, pcd=False)
        assert str(llm.last_answer) == "PCD off"
