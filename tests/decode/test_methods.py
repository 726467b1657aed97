"""Decoding methods on tiny models, each against something that does not share its code."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, close, contrasted, native_row, reference, rounding, shape, tolerance
from hypothesis import given
from hypothesis import strategies as st
from reference import behind

import pypcd
import research.methods  # noqa: F401  beside the product's, for all that methods have in common
from pypcd import engine
from pypcd.decode import Control, Method, Plain, Session, parse
from pypcd.decode.method import Edited, _place
from pypcd.decode.prompt_cache import N_LEFT, PromptCache
from pypcd.decode.recite import Recite
from pypcd.engine import token_bytes
from pypcd.prompt import Prompt
from pypcd.settings.formula import contrast, entropy, log_softmax
from research.methods.beam import Beam
from research.methods.cad import CAD
from research.methods.edits import AttentionSort, _ends, attention, medoid
from research.tensors import tap

# the tiny models' tokenizer has a token for each byte
PROMPT = Prompt("Look at: ", tuple(f"{i:02d}={i * 7 % 100:02d}" for i in range(12)), ", ", ". What is 05?", " It is")


@pytest.fixture
def llm(tiny: Tiny, load: Load) -> pypcd.Llama:
    return load(tiny("llama"), False, n_ctx=512, n_seq_max=24)


def rows_of(
    method: Method, llm: pypcd.Llama, n: int = 6, prompt: Prompt = PROMPT
) -> tuple[list[int], list[np.ndarray]]:
    seen: list[tuple[int, np.ndarray]] = []
    method.generate(llm, prompt, max_tokens=n, look=lambda token, row: seen.append((token, row.copy())))
    return [token for token, _ in seen], [row for _, row in seen]


def tokens_of(llm: pypcd.Llama, prompt: Prompt = PROMPT) -> list[int]:
    return llm.tokenize((prompt.text + prompt.answer_prefix).encode(), special=False)


# -- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["greedy", "pcd", "pcd:paper:cache=shared", "pcd:window:window=16", "pcd:cautious"])
def test_an_answer_is_what_llama_generates_with_that_setting(name: str, llm: pypcd.Llama) -> None:
    method = parse(name)
    tokens, _ = rows_of(method, llm)
    llm.reset()
    generated = llm.generate(tokens_of(llm), temp=0.0, pcd=False if name == "greedy" else method.rows.pcd)
    assert tokens == [next(generated) for _ in tokens]
    assert llm.pcd is None


@pytest.mark.parametrize("name", ["greedy", "sample:seed=3", "beam:2", "pcd", "segr+greedy"])
def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(name: str, llm: pypcd.Llama) -> None:
    """Any part of an answer is a stop text: what comes before its first place is the answer."""
    method = parse(name)
    whole = method.generate(llm, PROMPT, max_tokens=12)
    text = "".join(token_bytes(llm, token).decode("latin-1") for token in whole.tokens)
    readable = [c for c in whole.text if c.isprintable() and not c.isspace() and c != "\ufffd"]
    assert len(whole.tokens) == 12 and readable, text
    stop = readable[-1]
    short = method.generate(llm, PROMPT, max_tokens=12, stop=stop)
    if name != "beam:2":  # beams that end early leave room for others
        assert short.text == whole.text[: whole.text.index(stop)]
        assert short.tokens == whole.tokens[: len(short.tokens)]
    assert stop not in short.text and len(short.tokens) <= 12
    assert method.generate(llm, PROMPT, max_tokens=12, stop="no such text").text == whole.text


def test_a_contrasted_answer_says_what_pcd_did_as_the_model_itself_does(llm: pypcd.Llama) -> None:
    setting, text = "window:window=16:relative_top=0.5:evaluation=fused", PROMPT.whole
    answer = parse(f"pcd:{setting}").generate(llm, text, max_tokens=24)
    llm.create_completion(text, max_tokens=24, temperature=0, pcd=setting)
    assert answer.pcd and answer.pcd.n_contrasted and answer.pcd.n_changed
    assert answer.pcd == dataclasses.replace(llm.last_answer, setting=pypcd.PCDConfig.resolve(setting))
    for name in ("greedy", "beam:2+pcd:window"):
        assert parse(name).generate(llm, text, max_tokens=2).pcd is None


def test_white_space_before_an_answer_does_not_end_it() -> None:
    assert _place(b"\n\n Rome\nQ", ["\n"]) == 7 and _place(b"\n \n", ["\n"]) is None
    assert _place(b"Rome", ["\n"]) is None and _place(b"Rome\n", []) is None
    assert _place(b"a\nb\n\nc", ["\n\n", "c"]) == 3


def test_cad_is_two_contexts_apart(tiny: Tiny, load: Load, llm: pypcd.Llama) -> None:
    alpha = 0.7
    tokens, rows = rows_of(Method("cad", CAD(alpha)), llm)
    bare = PROMPT.replace(segments=())
    for i, row in enumerate(rows):
        texts = [[*tokens_of(llm, prompt), *tokens[:i]] for prompt in (PROMPT, bare)]
        with_context, without = (reference(tiny("llama"), cpu_rounding=True).standard(text)[-1] for text in texts)
        close(row, (1 + alpha) * with_context - alpha * without, contrasted(tolerance(tiny("llama")), alpha))
    assert len(set(tokens)) > 1


def test_the_control_subtracts_the_mean_of_other_prompts(tiny: Tiny, llm: pypcd.Llama) -> None:
    pool = tuple(PROMPT.replace(after=f". What is {i:02d}?") for i in range(3))
    control = Control(pool, pypcd.PCDConfig(beta=1.5, gamma=10, relative_top=0.01), n_steps=2)
    _, rows = rows_of(Method("control", control), llm, 3)
    ref = reference(tiny("llama"), cpu_rounding=True)

    def log_p(text: list[int]) -> np.ndarray:
        row = ref.standard(text)[-1]
        return row - np.log(np.exp(row).sum())

    prior = [np.zeros(llm.n_vocab()), np.zeros(llm.n_vocab())]
    for prompt in pool:
        text = tokens_of(llm, prompt)
        for t in range(2):
            p = log_p(text)
            prior[t] += p / len(pool)
            text = [*text, int(p.argmax())]
    plain = log_p(tokens_of(llm))
    kept = np.argsort(-plain, kind="stable")[:10]
    kept = kept[plain[kept] >= plain.max() + np.log(0.01)]
    wanted = 2.5 * plain[kept] - 1.5 * prior[0][kept]
    row = np.full(len(plain), -np.inf)
    row[kept] = wanted
    assert len(kept) > 1
    close(rows[0], behind(row, plain), contrasted(2 * tolerance(tiny("llama")), 1.5))  # of two log-softmaxes


def test_the_control_of_a_setting_contrasts_where_the_setting_does(llm: pypcd.Llama) -> None:
    """Not in an answer of whose first token the model is sure, nor before min_context."""
    unsure = Control(pcd=pypcd.PCDConfig.preset("unsure"))
    assert unsure == parse("control:0.75:relative_top=0.3:min_context=300:min_first_entropy=2.25").rows
    control = Control(pcd=pypcd.PCDConfig(gamma=9, min_entropy=1, alpha=0.5, n_sink=8), n_steps=4)
    assert parse("control:gamma=9:min_entropy=1:n_steps=4").rows == control
    assert Control(pcd=pypcd.PCDConfig.preset("window")) == parse("control").rows
    pool, at = (PROMPT.replace(after="?"),), len(tokens_of(llm)) + 2  # tokens before the third row
    tokens, rows = rows_of(Method("control", Control(pool, pypcd.PCDConfig(min_context=at))), llm, 4)
    plain, plain_rows = rows_of(parse("greedy"), llm, 4)
    assert tokens[:2] == plain[:2] and all(np.array_equal(a, b) for a, b in zip(rows[:2], plain_rows[:2]))
    for share, wanted in ((1.001, plain_rows), (0.999, rows_of(Method("control", Control(pool)), llm, 4)[1])):
        floor = pypcd.PCDConfig(min_first_entropy=entropy(plain_rows[0]) * share)
        found = rows_of(Method("control", Control(pool, floor)), llm, 4)[1]
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted)), share
    assert not np.array_equal(wanted[0], plain_rows[0])
    prior = Control(pool).means(Session(llm), False)[2]
    wanted = contrast(log_softmax(plain_rows[2]), prior)  # after the same tokens
    kept = np.isfinite(wanted)
    assert np.array_equal(rows[2][kept], wanted[kept].astype(np.float32)) and not np.array_equal(rows[2], plain_rows[2])


def test_controls_of_one_pool_share_its_answers(llm: pypcd.Llama) -> None:
    session, pools = Session(llm), [(PROMPT.replace(after=after), PROMPT) for after in ("?", ", ")]
    first = Control(pools[0]).means(session, False)
    assert Control(pools[0], pypcd.PCDConfig(beta=1)).with_pool(pools[0]).means(session, False) is first
    assert np.array_equal(Control(pools[0], n_steps=2).means(session, False), first[:2])
    assert not np.array_equal(Control(pools[1]).means(session, False), first)
    assert np.array_equal(Control(pools[0]).means(session, False), first)


def test_self_extend_divides_distant_positions(tiny: Tiny, load: Load) -> None:
    """With one layer keys do not depend on earlier tokens, so only final positions matter.

    By hand, for a group of 2 and a width of 4: the first eight of 13 tokens get positions 0 0 1 1 2 2 3 3, the rest follow."""
    path = tiny("llama", n_layer=1)
    model, text = load(path, False), TOKENS[:13]
    session = Session(model)
    row = parse("self-extend:2:width=4").rows.open(session, PROMPT, text).first
    close(
        row,
        reference(path, cpu_rounding=True).standard(text, [0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8])[-1],
        tolerance(path),
    )
    plain = Plain().open(session, PROMPT, text).first
    close(plain, reference(path, cpu_rounding=True).standard(text)[-1], tolerance(path))
    assert np.abs(row - plain).max() > 0.05


def test_self_extend_refuses_keys_that_llama_cpp_cannot_move(tiny: Tiny, load: Load) -> None:
    """Of latent keys in blocks llama.cpp says that it can, and ends the process at the next evaluation."""
    for types, said in ({"type_k": 8, "type_v": 8, "flash_attn": True}, "cannot be moved"), ({}, None):
        refusal = parse("self-extend").rows.refusal(load(tiny("deepseek2"), False, **types))
        assert refusal is None if said is None else said in str(refusal)


# -- beams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["", "+pcd", "+pcd:paper:cache=shared", "+cad"])
def test_beams_carry_the_rows_that_one_answer_has(rows: str, llm: pypcd.Llama) -> None:
    """The beams' answer, evaluated alone, has at least greedy's probability per token, from the same rows."""
    rng = np.random.default_rng(3)
    single = parse("greedy" + rows)

    def score(tokens: tuple[int, ...]) -> float:
        stream = single.rows.open(Session(llm), PROMPT, tokens_of(llm))
        row, total = stream.first, 0.0
        for token in tokens:
            total += row[token] - np.log(np.exp(row.astype(float) - row.max()).sum()) - row.max()
            row = stream.step({0: token})[0]
        return total / len(tokens)

    beams = parse("beam:4" + rows).generate(llm, PROMPT, max_tokens=5)
    greedy = single.generate(llm, PROMPT, max_tokens=5)
    others = [tuple(rng.integers(3, 259, 5).tolist()) for _ in range(5)]
    assert score(beams.tokens) >= score(greedy.tokens) - 1e-3
    assert score(beams.tokens) > max(map(score, others))


# -- the session -----------------------------------------------------------------------------------------------------


def in_any_order(llm: pypcd.Llama, todo: list[tuple[str, Prompt]]) -> dict[tuple[str, Prompt], Any]:
    """The answers of a session, whose rows do not depend on their order, to the bit."""
    found: list[dict[tuple[str, Prompt], Any]] = []
    rows: list[dict[tuple[str, Prompt], list[np.ndarray]]] = []
    for order in (todo, todo[::-1]):
        engine.clear(llm)
        llm._n_changes += 1  # as if another had used it
        session, told = Session(llm), {one: list[np.ndarray]() for one in order}
        asked = ((one, lambda _, row, rows=told[one]: rows.append(row.copy())) for one in order)
        found.append({one: parse(one[0]).generate(session, one[1], max_tokens=6, look=look) for one, look in asked})
        rows.append(told)
    for one in todo:
        assert found[0][one].tokens == found[1][one].tokens, one
        assert all(np.array_equal(a, b) for a, b in zip(rows[0][one], rows[1][one], strict=True)), one
    return found[0]


def test_methods_share_a_prompt(llm: pypcd.Llama) -> None:
    names = [
        "greedy",
        "pcd",
        "beam:3+pcd",
        "pcd:paper:cache=shared",
        "self-extend:2:width=32",
        "cad",
        "pcd:paper:alpha=0.4",
    ]
    names += ["replay:3", "recite:4+pcd", "segr:2", "dola-low", "ms-poe"]
    found = in_any_order(llm, [(name, PROMPT) for name in names])
    n_evaluated = [found[name, PROMPT].n_evaluated for name in ("greedy", "pcd", "beam:3+pcd", names[4])]
    n = found["greedy", PROMPT].n_prompt
    assert n_evaluated == [n, 1, 1, n], "the last token, with each method's own setting; keys of its own"


def n_shared(llm: pypcd.Llama) -> int:
    """How many tokens of PROMPT's text all questions about it have in common; the last ones are read with each question."""
    return len(llm.tokenize((PROMPT.before + PROMPT.context).encode(), special=False)) - N_LEFT


def test_questions_share_their_text(llm: pypcd.Llama) -> None:
    prompts = [PROMPT.replace(after=f". What is {i:02d}?") for i in (5, 9)]
    found = in_any_order(
        llm, [(name, p) for name in ("greedy", "pcd", "replay:2:finder=bm25", "beam:2") for p in prompts]
    )
    read = [answer.n_prompt - answer.n_evaluated for answer in found.values()]
    assert read == [0, *[n_shared(llm)] * 7]
    assert found["replay:2:finder=bm25", prompts[0]].n_prompt > found["greedy", prompts[0]].n_prompt


@pytest.mark.parametrize("n_batch", [512, 16])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_an_edited_prompt_builds_on_the_text_of_the_first(arch: str, n_batch: int, tiny: Tiny, load: Load) -> None:
    """The rows are those of the whole edited prompt, which the reference evaluates."""
    path, replay = tiny(arch), parse("replay:3:finder=bm25")
    llm = load(path, False, n_batch=n_batch)
    session, seen = Session(llm), list[np.ndarray]()
    edited = replay.edit.edit(session, PROMPT, chat=False, answer=never)  # type: ignore[union-attr]
    assert [passage.text for passage in edited.found.passages] == ["05=35"]
    assert edited.prompt == PROMPT.replace(after="\n\nFrom the text above:\n\n05=35\n\n" + PROMPT.after)
    tokens = tokens_of(llm, edited.prompt)
    parse("greedy").generate(session, PROMPT, max_tokens=1)
    answer = replay.generate(session, PROMPT, max_tokens=3, look=lambda _, row: seen.append(row.copy()))
    assert answer.n_prompt == len(tokens) and answer.found == edited.found
    # a recurrent state cannot go back, so that all is evaluated again
    assert answer.n_evaluated == len(tokens) - (0 if arch == "lfm2" else n_shared(llm))
    wanted = reference(path, cpu_rounding=True)
    for i, row in enumerate(seen):
        close(row, wanted.standard([*tokens, *answer.tokens[:i]])[-1], tolerance(path))


@pytest.mark.parametrize("name", ["ms-poe", "self-extend:2:width=16"])
def test_methods_that_change_keys_neither_read_nor_write_the_disk(name: str, tmp_path: Any, llm: pypcd.Llama) -> None:
    prompt = PROMPT.replace(segments=tuple(f"{i:02d}={i * 7 % 100:02d}" for i in range(50)))
    alone = rows_of(parse(name), llm, 3, prompt)
    cache = PromptCache(tmp_path, 2**30)

    def evaluated(name: str) -> int:
        engine.clear(llm)
        llm._n_changes += 1
        session, rows = Session(llm, cache=cache), list[np.ndarray]()
        look = lambda token, row: rows.append(row.copy())
        answer = parse(name).generate(session, prompt, max_tokens=3, look=look)
        if name != "greedy":
            assert all(np.array_equal(a, b) for a, b in zip(rows, alone[1], strict=True))
        return answer.n_prompt - answer.n_evaluated

    assert evaluated(name) == 0 and not cache.entries()
    assert evaluated("greedy") == 0 and len(cache.entries()) == 1
    assert evaluated(name) == 0 and len(cache.entries()) == 1
    assert evaluated("greedy") == cache.entries()[0].n_tokens > 256


@pytest.mark.parametrize("why", [KeyboardInterrupt, ValueError])
def test_what_was_half_read_is_not_taken_for_the_whole(why: Any, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False, n_batch=16)
    session = Session(llm)
    wanted = parse("greedy").generate(session, PROMPT, max_tokens=3)

    def stop(done: int, total: int) -> None:
        if done >= 32 and why is KeyboardInterrupt:
            raise KeyboardInterrupt

    session.hold(TOKENS[:20])
    llm.progress = stop
    for _ in range(2):
        with pytest.raises(why):
            session.hold(tokens_of(llm) if why is KeyboardInterrupt else TOKENS * 3, 60)
    llm.progress = None
    found = parse("greedy").generate(session, PROMPT, max_tokens=3)
    assert (found.tokens, found.n_evaluated) == (wanted.tokens, wanted.n_prompt)


def test_without_a_limit_an_answer_ends_with_the_context(llm: pypcd.Llama) -> None:
    answer = parse("greedy").generate(llm, PROMPT, max_tokens=0)
    assert answer.end == "context" and answer.n_prompt + len(answer.tokens) == llm.n_ctx()
    assert parse("greedy").generate(llm, PROMPT, max_tokens=3).end == "length"


OWN_ROWS = ["replay:3", "recite:4", "pcd:paper:cache=shared", "self-extend:2:width=16", "ms-poe", "dola-low", "cad"]


@pytest.mark.parametrize(
    ("name", "fails"), [*((name, True) for name in OWN_ROWS), ("recite:4", False), ("beam:4+pcd", False)]
)
def test_afterwards_the_same_prompt_has_the_models_own_rows(name: str, fails: bool, tiny: Tiny, load: Load) -> None:
    """Also after an error, at the first token that is chosen."""
    path, how = tiny("llama", n_layer=4), {"n_ctx": 512, "n_seq_max": 24, "n_batch": 128, "n_ubatch": 128}
    fresh, llm = (load(path, False, **how) for _ in range(2))

    def look(token: int, row: np.ndarray) -> None:
        if fails:
            raise KeyError("stop")

    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        parse(name).generate(llm, PROMPT, max_tokens=4, look=look)
    rows = []
    for model in (fresh, llm):
        generated = model.generate(tokens_of(model), temp=0.0)
        next(generated)
        rows.append(native_row(model))
    close(rows[0], rows[1], rounding(path))
    with tap(llm, ["l_out"]):  # which is refused while a method taps
        pass


def test_a_session_notices_that_the_model_was_used_otherwise(llm: pypcd.Llama) -> None:
    session = Session(llm)
    before = parse("greedy").generate(session, PROMPT, max_tokens=5)
    llm("something else, of another length", max_tokens=3)
    after = parse("greedy").generate(session, PROMPT, max_tokens=5)
    assert after.tokens == before.tokens and after.n_evaluated == after.n_prompt


def test_the_models_own_setting_and_answers_stay(llm: pypcd.Llama) -> None:
    llm.pcd = config = pypcd.PCDConfig(beta=1.5)
    before = llm("1, 2, 3", max_tokens=5, temperature=0)["choices"][0]["text"]
    for name in ("greedy", "pcd", "beam:2+pcd:window", "cad", "self-extend"):
        parse(name).generate(llm, PROMPT, max_tokens=3)
        assert llm.pcd == config
        assert llm("1, 2, 3", max_tokens=5, temperature=0)["choices"][0]["text"] == before, name
    with pytest.raises(ValueError, match="allowed: 1 to 511"):
        parse("greedy").generate(llm, "x" * 600)
    assert llm.pcd == config


# -- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prompt", "how", "named"),
    [
        ("greedy", PROMPT, {"max_tokens": -1}, "max_tokens is -1"),
        ("greedy", PROMPT, {"chat": True}, "chat template"),
        ("cad", "a text without parts", {}, "no context"),
        ("control", PROMPT, {}, "other prompts"),
        ("segr", "a text without parts", {}, "0 segments"),
        ("beam:4", PROMPT, {"of": {"n_seq_max": 1}}, "n_seq_max=9"),
        ("beam:8", "x" * 230, {"of": {"n_ctx": 256}, "max_tokens": 24}, "larger n_ctx"),
        ("beam:2", PROMPT, {"of": {"arch": "lfm2"}}, "recurrent state"),
        ("self-extend", PROMPT, {"of": {"arch": "gpt2"}}, "no rotary positions"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_a_model_and_a_session_as_they_were(
    name: str, prompt: Any, how: dict[str, Any], named: str, tiny: Tiny, load: Load
) -> None:
    of = {"arch": "llama", "n_ctx": 512, "n_seq_max": 24, **how.get("of", {})}
    path = tiny(of.pop("arch"))
    stock, llm = (load(path, False, **of) for _ in range(2))
    session = Session(llm)
    with pytest.raises((ValueError, pypcd.PCDError), match=named):
        parse(name).generate(session, prompt, **{key: value for key, value in how.items() if key != "of"})
    assert parse("greedy").generate(session, PROMPT, max_tokens=2).tokens
    if name == "control":  # what is refused is this control, not every one
        assert parse(name).with_pool((PROMPT,)).generate(session, PROMPT, max_tokens=2).tokens
    engine.clear(llm)
    for model in llm, stock:
        model.eval(TOKENS[:20])
    assert np.array_equal(native_row(llm), native_row(stock))


# -- edits -----------------------------------------------------------------------------------------------------------


def test_rephrasing_asks_behind_the_question(llm: pypcd.Llama) -> None:
    answer = parse("rephrase").generate(llm, PROMPT, max_tokens=4)
    asked = PROMPT.replace(after=PROMPT.after + " Please repeat the relevant content before analysis.")
    assert answer.tokens == parse("greedy").generate(llm, asked, max_tokens=4).tokens


@given(st.permutations(range(9)))
def test_the_best_segments_go_to_the_ends(order: list[int]) -> None:
    assert _ends([0, 1, 2, 3]) == [2, 0, 1, 3]  # ascending by score: 3 is the best
    assert _ends([4, 0, 1, 2, 3]) == [2, 0, 4, 1, 3]
    assert sorted(_ends(order)) == sorted(order)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_segments_are_sorted_by_the_attention_they_get(flash_attn: bool, tiny: Tiny, load: Load) -> None:
    """From the prompt's last token, by the reference; a token across two segments counts for both."""
    path = tiny("llama")
    llm = load(path, False, flash_attn=flash_attn)
    tokens = tokens_of(llm)
    pays = np.concatenate([weights[:, -1] for weights in reference(path).trace(tokens).attention])
    ends = np.cumsum([len(token_bytes(llm, token)) for token in tokens])
    wanted, at = [], ends[-1] - len(PROMPT.whole + PROMPT.answer_prefix) + len(PROMPT.before)
    for segment in PROMPT.segments:
        inside = (ends > at) & (ends - [len(token_bytes(llm, token)) for token in tokens] < at + len(segment))
        wanted.append(pays[:, inside].sum(axis=1).mean())
        at += len(segment) + len(PROMPT.joiner)
    close(attention(Session(llm), PROMPT, False), np.array(wanted), tolerance(path, of=1.0, **shape(llm)))
    once = AttentionSort(rounds=1).edit(Session(llm), PROMPT, chat=False, answer=never).prompt
    assert list(once.segments) == [PROMPT.segments[i] for i in np.argsort(wanted)] and once.segments != PROMPT.segments


def test_what_is_recited_becomes_the_context(llm: pypcd.Llama) -> None:
    asked: list[tuple[Prompt, int | None]] = []

    def answer(prompt: Prompt, max_tokens: int | None = None) -> str:
        asked.append((prompt, max_tokens))
        return " 05=35, as it stands\nin the text \n\nAnd more."

    prompt = PROMPT.replace(shots=(("1+1?", " 2"),))
    edited = Recite(7).edit(Session(llm), prompt, chat=False, answer=answer)
    assert edited == Edited(prompt.replace(segments=("05=35, as it stands\nin the text",)))
    ((first, n),) = asked
    assert n == 7 and first.text == PROMPT.text + Recite().request and not (first.shots or first.answer_prefix)
    silent = Recite().edit(Session(llm), prompt, chat=False, answer=lambda prompt, max_tokens=None: " \n\n ")
    assert silent == Edited(prompt)
    alone = Prompt(after="a question alone")
    assert Recite().edit(Session(llm), alone, chat=False, answer=never) == Edited(alone)


def test_reciting_takes_two_answers_of_the_same_rows(llm: pypcd.Llama) -> None:
    setting = "pcd:paper:window=9:perturbation=none"
    first = PROMPT.replace(after=PROMPT.after + Recite().request, answer_prefix="")
    said = parse(setting).generate(llm, first, max_tokens=12).text.strip().partition("\n\n")[0].strip()
    wanted = parse(setting).generate(llm, PROMPT.replace(segments=(said,)), max_tokens=4)
    found = parse(f"recite:12+{setting}").generate(llm, PROMPT, max_tokens=4)
    assert said and found.tokens == wanted.tokens and found.n_prompt == wanted.n_prompt


def never(prompt: Prompt, max_tokens: int | None = None) -> str:
    raise AssertionError("this edit asks nothing")


def test_the_medoid_is_the_answer_most_like_the_others() -> None:
    assert medoid(["aa11", "bb22", "aa12"]) in (0, 2)
    assert medoid(["zzzz", "same", "same"]) == 1
    assert medoid(["", "", "x"]) == 0


def test_a_vote_answers_one_of_its_orders(llm: pypcd.Llama) -> None:
    answer = parse("segr-vote:3:seed=4").generate(llm, PROMPT, max_tokens=4)
    assert answer.tokens == parse("segr-vote:3:seed=4").generate(llm, PROMPT, max_tokens=4).tokens
    assert answer.n_evaluated >= 3 * answer.n_prompt


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_name_may_have_a_part_of_each_kind() -> None:
    method = parse("rephrase + pcd:cautious:beta=2 + beam:4:length_penalty=0.5")
    assert method.rows.pcd == pypcd.PCDConfig.preset("cautious").replace(beta=2)
    assert method.search == Beam(4, 0.5) and method.edit is not None
    assert method.n_sequences == 9 and parse("beam:4+cad").n_sequences == 18


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("beem", "did you mean 'beam'"),
        ("greedy+beam", "two parts of one kind"),
        ("pcd:off", "write greedy"),
        ("pcd:betta=1", "did you mean 'beta'"),
        ("beam:n=x", "n is 'x'"),
        ("beam:1", "n is 1"),
        ("beam:32", "n is 32"),
        ("beam:2:length_penalty=11", "length_penalty is 11"),
        ("sample:0", "temperature is 0"),
        ("sample:min_p=-0.1", "min_p is -0.1"),
        ("sample:repeat_penalty=0", "repeat_penalty is 0"),
        ("sample:top_k=-1", "top_k is -1"),
        # what is left of pcd:paper:beta=1.5,window=64, since commas stand between methods
        ("window=64", "no method 'window=64', a value follows its method and a colon"),
        ("greedy:3", "Greedy has no value '3'"),
        ("cad:-1", "alpha is -1"),
        ("segr-vote:2", "n is 2"),
        ("control:gamma=0", "gamma is 0"),
        ("control:n_steps=0", "n_steps is 0"),
        ("beam:2:n=3", "n is given twice"),
        ("pcd:tuned.json", "write its values"),
        ("self-extend:4:width=6", "allowed"),
        ("dola", "dola-low"),
        ("dola:2:2", "each layer once"),
        ("dola-low:3", "write dola:3"),
        ("dola-low+pcd", "two parts of one kind"),
        ("ms-poe:max_ratio=1", "max_ratio is 1; .* min_ratio"),
        ("ms-poe:order=x", "order is 'x'"),
    ],
)
def test_a_wrong_name_is_refused_with_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse(text)


def test_llama_takes_a_number_of_sequences(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False, n_seq_max=3)
    assert llm.n_seq_max == llama_cpp.llama_n_seq_max(llm.ctx) == 3
    for value in (0, 193, True, "2"):
        with pytest.raises(ValueError, match="n_seq_max is .* allowed: an integer from 1 to 192"):
            load(tiny("llama"), False, n_seq_max=value)
