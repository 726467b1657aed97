"""Several texts at once in one context: scores against stock's rows and the float64 reference, answers against pypcd.Llama."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, contrasted, expected, native_row, on_stock, rounding, tolerance, turn
from reference import contrast

import pypcd
from pypcd import engine
from pypcd.decode import Sampling
from pypcd.integrations.texts import Texts, choice, scoring
from pypcd.settings.config import PCDConfig
from pypcd.settings.formula import entropy, log_softmax

Pair = tuple[list[int], list[int]]

SHARED = TOKENS[:30]
# three contexts that begin alike, continuations that do too, one that another begins with, one of a single token
PAIRS: list[Pair] = [
    ([*SHARED, *TOKENS[40:50]], TOKENS[60:64]),
    ([*SHARED, *TOKENS[40:50]], [*TOKENS[60:63], 9]),
    ([*SHARED, *TOKENS[40:50]], TOKENS[60:62]),
    ([*SHARED, *TOKENS[40:50]], [7]),
    ([*SHARED, *TOKENS[50:53]], TOKENS[70:80]),
    (SHARED, TOKENS[30:36]),
    (TOKENS[:1], TOKENS[1:4]),
    (SHARED, TOKENS[30:36]),
]
SETTINGS = [
    "paper:beta=1.5",
    "paper:cache=shared:beta=1.5",
    "paper:window=8:perturbation=none:beta=0.75:relative_top=0.3",
    "paper:beta=4:relative_top=0.1",
]

STOCK = pytest.param("window:window=4:gamma=3", id="stock", marks=on_stock)


@pytest.fixture
def llm(tiny: Tiny, load: Load) -> pypcd.Llama:
    return load(tiny("llama"), False, n_seq_max=5)


def scores(
    llm: pypcd.Llama, pairs: Sequence[Pair], config: PCDConfig | None = None, n: int = 4
) -> list[tuple[float, bool]]:
    found = {i: (value, greedy) for i, value, greedy in Texts(llm, n, config).score(pairs)}
    return [found[i] for i in range(len(pairs))]


def stock_scores(llm: pypcd.Llama, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    """Token by token, from the rows of plain decoding."""
    made = []
    for context, rest in pairs:
        llm.reset()
        llm.eval(context)
        value, greedy = 0.0, True
        for token in rest:
            row = native_row(llm).astype(np.float64)
            value += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
            greedy &= int(row.argmax()) == token
            llm.eval([token])
        made.append((value, greedy))
    return made


def greedy_pairs(llm: pypcd.Llama, n: int = 6, **kwargs: Any) -> list[Pair]:
    """What generation writes; and the same with another last token."""
    pairs = []
    for prompt in ([*SHARED, *TOKENS[40:50]], SHARED, TOKENS[:12]):
        answer = list(itertools.islice(llm.generate(prompt, temp=0.0, **kwargs), n))
        pairs += [(prompt, answer), (prompt, [*answer[:-1], 5 if answer[-1] != 5 else 6])]
    return pairs


# -- plain -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2", "gpt2", "mamba", "lfm2"])
def test_plain_scores_are_those_of_stocks_rows(arch: str, tiny: Tiny, load: Load) -> None:
    """Whatever is beside them; a recurrent state takes one text at a time."""
    recurrent = arch in ("mamba", "lfm2")
    llm = load(tiny(arch), False, n_seq_max=1 if recurrent else 5)
    pairs = PAIRS if recurrent else [*PAIRS, *greedy_pairs(llm)]
    wanted, limit = stock_scores(llm, pairs), rounding(tiny(arch))
    for n in (1,) if recurrent else (1, 2, 4):
        got = scores(llm, pairs, n=n)
        for (value, greedy), (ours, is_greedy), (_, rest) in zip(wanted, got, pairs):
            assert ours == pytest.approx(value, abs=2 * limit * len(rest))
            assert is_greedy == greedy or recurrent
        assert recurrent or {greedy for _, greedy in got} == {True, False}


def test_what_contexts_begin_with_is_read_once(llm: pypcd.Llama) -> None:
    texts = Texts(llm, 4)
    assert len(list(texts.score(PAIRS))) == len(PAIRS)
    # the last token of a context is read with its continuation: 29 shared and that of SHARED itself, 9 and 2 more
    assert texts.n_read == 30 + 9 + 2
    assert sum(len(context) - 1 for context, _ in PAIRS) > 5 * texts.n_read


def test_a_text_may_fill_the_context(tiny: Tiny, load: Load) -> None:
    """n_ctx tokens are read, and one more is scored; with PCD the twins need room that they have to find."""
    for setting in (None, PCDConfig(beta=1.5)):
        llm = load(tiny("llama"), False, n_seq_max=5)
        full = (TOKENS * 3)[: llm.n_ctx() + 1]
        pairs = [(full[:i], full[i:]) for i in (1, 100, len(full) - 1)]
        got = scores(llm, pairs, setting)
        assert got[0][0] < got[1][0] < got[2][0] < 0
        with pytest.raises(ValueError, match="a text has 100 tokens of context and 158 to be scored; allowed: .* 257"):
            scores(llm, [(full[:100], [*full[100:], 3])], setting)


def test_what_cannot_be_scored_is_refused_before_anything_is(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    for pair in (([], [3]), ([3], [])):
        with pytest.raises(ValueError, match="allowed: at least one of each"):
            scores(llm, [PAIRS[0], pair], n=1)
    with pytest.raises(ValueError, match="sequences is 'chosen', which contrasts nothing here; allowed: 'all'"):
        Texts(llm, 1, PCDConfig(sequences="chosen"))


# -- with PCD ------------------------------------------------------------------------------------------------------------


def wanted_row(path: Path, tokens: list[int], config: PCDConfig) -> np.ndarray:
    """log-softmax of (1 + beta) L - beta L* over all tokens, in float64."""
    first, second = expected(path, tokens, len(tokens) - 1, config)
    return log_softmax(contrast(first, second, config.beta, len(first), 0.0))


@pytest.mark.parametrize("setting", [*SETTINGS, pytest.param(SETTINGS[3], id="stock", marks=on_stock)])
def test_scores_are_the_references_contrast_without_a_cut(setting: str, tiny: Tiny, llm: pypcd.Llama) -> None:
    """And the same one by one and together."""
    path, config = tiny("llama"), PCDConfig.resolve(setting)
    assert config is not None
    plain, got, alone = scores(llm, PAIRS), scores(llm, PAIRS, config), scores(llm, PAIRS, config, 1)
    limit = 2 * contrasted(tolerance(path) * turn(path, config), config.beta)
    apart = 0.0
    for (context, rest), (value, _), (without, _) in zip(PAIRS, got, plain):
        rows = [wanted_row(path, [*context, *rest[:i]], config) for i in range(len(rest))]
        assert all(np.exp(row).sum() == pytest.approx(1.0) for row in rows)
        assert value == pytest.approx(sum(row[token] for row, token in zip(rows, rest)), abs=limit * len(rest))
        apart = max(apart, abs(value - without))
    assert apart > limit * 10, "PCD must change a score, or this test shows nothing"
    limit = 2 * contrasted(rounding(path) * turn(path, config), config.beta)
    for (value, is_greedy), (one, is_one), (_, rest) in zip(got, alone, PAIRS):
        assert one == pytest.approx(value, abs=limit * len(rest)) and is_one == is_greedy


@pytest.mark.parametrize(
    "setting", ["paper:beta=2.5:gamma=4", "paper:beta=4:relative_top=0.9", "window:window=4:gamma=3", STOCK]
)
def test_greedy_means_what_generation_writes_with_its_cut(setting: str, llm: pypcd.Llama) -> None:
    """The best token of the whole row is often another one, which the cut excludes."""
    config = PCDConfig.resolve(setting)
    assert config is not None
    pairs = greedy_pairs(llm, pcd=config.repeatable())
    got = scores(llm, pairs, config)
    assert [is_greedy for _, is_greedy in got] == [True, False] * (len(pairs) // 2)

    lifted = scoring(config, llm.n_vocab())
    assert (lifted.gamma, lifted.relative_top, lifted.beta) == (llm.n_vocab(), 0.0, config.beta)
    others = 0
    llm.pcd = lifted
    for context, rest in pairs[::2]:
        llm.reset()
        llm.eval(context)
        for token in rest:
            rows = llm.pcd_logits()
            assert choice(rows.standard, rows.contrasted, config) == token
            others += int(rows.contrasted.argmax()) != token
            llm.eval([token])
    assert others, "the cut must exclude a best token, or this test shows nothing"


def test_a_choice_by_hand() -> None:
    config = PCDConfig(gamma=3, relative_top=0.0)
    row = np.array([1.0, 4.0, 3.0, 3.0, 3.0, -np.inf], np.float32)
    best = np.array([9.0, 1.0, 2.0, 3.0, 8.0, -np.inf], np.float32)
    assert choice(row, best, config) == 3  # 1, 2, 3 are plausible: of equal logits the lower ids
    assert choice(row, best, config.replace(gamma=100)) == 0
    assert choice(row, best, config.replace(relative_top=0.5)) == 1  # exp(-1) is less than a half
    assert choice(row, best, config.replace(gamma=1)) == 1
    assert choice(np.full(3, -np.inf, np.float32), best[:3], config) == 0


def test_floors_decide_as_in_generation(tiny: Tiny, llm: pypcd.Llama) -> None:
    """A continuation is an answer: it is plain where the row before it has too little entropy, or the context is short."""
    path = tiny("llama")
    bits = []
    for context, _ in PAIRS:
        llm.reset()
        llm.eval(context)
        bits.append(entropy(native_row(llm)))
    least = float(np.mean([min(bits), max(bits)]))
    assert min(abs(bit - least) for bit in bits) > 1e-3
    config = PCDConfig(beta=1.5)
    plain, full = scores(llm, PAIRS), scores(llm, PAIRS, config)
    limit = 2 * contrasted(rounding(path) * turn(path, config), 1.5)
    for n in (1, 4):
        by_entropy = scores(llm, PAIRS, config.replace(min_first_entropy=least), n)
        by_length = scores(llm, PAIRS, config.replace(min_first_entropy=1e-9, min_context=35), n)
        for i, (context, rest) in enumerate(PAIRS):
            like = full if bits[i] >= least else plain
            assert by_entropy[i][0] == pytest.approx(like[i][0], abs=limit * len(rest))
            like = full if len(context) >= 35 else plain
            assert by_length[i][0] == pytest.approx(like[i][0], abs=limit * len(rest))
    # a floor for each token: 36 tokens of context are there from the answer's fifth token on, or the first
    by_token = scores(llm, PAIRS, config.replace(min_context=33))
    assert abs(by_token[5][0] - plain[5][0]) > limit and abs(by_token[5][0] - full[5][0]) > limit


def test_the_models_own_setting_is_there_again(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper:beta=0.5", n_seq_max=5)
    before = llm.pcd
    running = Texts(llm, 4, PCDConfig(beta=2)).score(PAIRS)
    next(running)
    running.close()  # also where somebody stops half-way
    assert llm.pcd == before and llm.n_tokens == 0
    assert all(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), i) < 0 for i in range(5))


# -- answers -------------------------------------------------------------------------------------------------------------

PROMPTS = [TOKENS[:20], TOKENS[:40], [*TOKENS[:20], 9, 8, 7], TOKENS[50:60], TOKENS[:20], TOKENS[3:9], TOKENS[:41]]


def answers(llm: pypcd.Llama, config: PCDConfig | None = None, n: int = 3, **kwargs: Any) -> list[str]:
    found = dict(Texts(llm, n, config).answers(PROMPTS, **{"max_tokens": 8, **kwargs}))
    return [found[i] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "setting", [None, "paper:beta=1.5", "window:window=4:beta=4", "paper:cache=shared:min_first_entropy=6.3", STOCK]
)
def test_answers_are_pypcd_llamas(setting: str | None, llm: pypcd.Llama) -> None:
    config = PCDConfig.resolve(setting)
    wanted = []
    for prompt in PROMPTS:
        tokens = itertools.islice(llm.generate(prompt, temp=0.0, pcd=config.repeatable() if config else False), 8)
        wanted.append(b"".join(engine.token_bytes(llm, token) for token in tokens).decode("utf-8", "replace"))
    for n in (1, 3):
        assert answers(llm, config, n) == wanted
    if setting:
        assert answers(llm, config) != answers(llm)


def test_a_text_or_a_token_ends_an_answer(llm: pypcd.Llama) -> None:
    whole = answers(llm)
    stop = whole[0][2:4]
    assert stop and answers(llm, stops=["never", stop])[0] == whole[0][: whole[0].index(stop)]
    tokens = list(itertools.islice(llm.generate(PROMPTS[0], temp=0.0), 8))
    end = next(i for i, token in enumerate(tokens) if i and token not in tokens[:i])
    text = b"".join(llm.detokenize([token], prev_tokens=[3]) for token in tokens[:end]).decode()
    assert answers(llm, ends=[tokens[end]])[0] == text
    assert answers(llm, max_tokens=2)[0] == whole[0][: len(answers(llm, max_tokens=2)[0])] != whole[0]


def test_drawn_answers_do_not_depend_on_what_is_beside_them(llm: pypcd.Llama) -> None:

    def chooser(i: int) -> Any:
        return Sampling(temperature=1.0, top_k=20, seed=i).chooser(repr(PROMPTS[i]).encode())

    alone, together = (answers(llm, n=n, chooser=chooser) for n in (1, 3))
    assert alone == together != answers(llm)
    assert alone[0] != alone[4], "the same prompt twice, with two seeds"


def test_what_does_not_fit_waits_and_what_never_fits_is_refused(llm: pypcd.Llama) -> None:
    prompts = [(TOKENS[i:] * 3)[:150] for i in range(4)]  # two of them are more than the context of 256
    for config in (None, PCDConfig(beta=1.5)):
        together, alone = (dict(Texts(llm, n, config).answers(prompts, max_tokens=20)) for n in (3, 1))
        assert together == alone and len(together) == 4
    with pytest.raises(
        ValueError, match="a prompt has 150 tokens; allowed: at least one, and with an answer of 107 256"
    ):
        list(Texts(llm, 3).answers(prompts, max_tokens=107))
