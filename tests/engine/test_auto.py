"""evaluation="auto": what it chooses, fed with made-up times; the tokens it gives; and graphs that take turns."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Callable

import llama_cpp
import numpy as np
import pytest
from batches import SHORT_SLIDING, Native, ask, same_rows
from conftest import TOKENS, Tiny, check_rows, greedy, run_python
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import HYBRID_ARCHS

import pypcd
from pypcd.decode import Session
from pypcd.engine import _bindings as _native

Load = Callable[..., pypcd.Llama]

# --- the choice, by times and counts alone ---


def chosen(fused: Any, plain: Any, twin: Any, needed: Any, n_rows: int = 1, window: Any = 0) -> np.ndarray:
    """Which steps are fused. The arguments broadcast to one value a step: seconds, how many twins are needed, and the
    setting, a window."""
    values = np.broadcast_arrays(*map(np.asarray, (fused, plain, twin, needed, window)))
    times = [np.ascontiguousarray(x, np.float64) for x in values[:3]]
    counts, windows = (np.ascontiguousarray(x, np.int32) for x in values[3:])
    result = np.zeros(values[0].shape, bool)
    double_p, int_p, bool_p = map(ctypes.POINTER, (ctypes.c_double, ctypes.c_int32, ctypes.c_bool))
    _native.pcd_choose(
        len(result),
        n_rows,
        *(x.ctypes.data_as(double_p) for x in times),
        counts.ctypes.data_as(int_p),
        windows.ctypes.data_as(int_p),
        result.ctypes.data_as(bool_p),
    )
    return result


def total(ways: np.ndarray, fused: Any, plain: Any, twin: Any, needed: np.ndarray) -> tuple[float, float]:
    """The time of these ways, and that of the better way taken throughout, after the first 32 steps."""
    alternate, fused = plain + needed * twin, fused * np.ones(len(ways))
    return np.where(ways, fused, alternate)[32:].sum(), min(fused[32:].sum(), alternate[32:].sum())


costs = {"fused": st.floats(1.0, 2.3), "twin": st.floats(0.6, 1.4), "seed": st.integers(0, 2**32 - 1)}


def test_both_ways_are_tried_at_first() -> None:
    for fused, twin in ((1.0, 1.4), (2.3, 0.6)):
        assert chosen(fused, 1.0, twin, np.ones(6)).tolist() == [True] * 3 + [False] * 3


@given(**costs, slow=st.floats(0.5, 10))
def test_the_first_step_after_a_change_of_ways_does_not_count(
    fused: float, twin: float, seed: int, slow: float
) -> None:
    """It takes longer than those that follow it, and the choice is the same."""
    plain, needed = np.ones(200), np.ones(200)
    plain[3] = slow  # the first one that alternates
    assert chosen(fused, plain, twin, needed).tolist() == chosen(fused, 1.0, twin, needed).tolist()


@given(**costs, p=st.floats(0, 1), noise=st.floats(0, 0.1), growth=st.floats(0, 2))
def test_it_stays_within_five_percent_of_the_better_way(
    fused: float, twin: float, seed: int, p: float, noise: float, growth: float
) -> None:
    """With times that scatter and that grow with the context."""
    rng, n = np.random.default_rng(seed), 1056
    needed, scale = rng.random(n) < p, 1 + growth * np.arange(n) / n
    seen = [x * scale * rng.uniform(1 - noise, 1 + noise, n) for x in (fused, 1.0, twin)]
    mine, best = total(chosen(*seen, needed), fused * scale, scale, twin * scale, needed)
    assert mine <= 1.05 * best


@given(**costs, runs=st.lists(st.tuples(st.booleans(), st.integers(1, 300)), min_size=1, max_size=12))
def test_after_each_change_of_the_text_it_loses_a_few_steps_at_most(
    fused: float, twin: float, seed: int, runs: list[tuple[bool, int]]
) -> None:
    needed = np.concatenate([np.full(n, value) for value, n in runs])
    mine, best = total(chosen(fused, 1.0, twin, needed), fused, 1.0, twin, needed)
    assert mine <= 1.05 * best + 8 * twin * len(runs)


@given(**costs, p=st.floats(0, 1), outliers=st.integers(0, 10))
def test_steps_that_were_disturbed_do_not_decide(fused: float, twin: float, seed: int, p: float, outliers: int) -> None:
    """One step in twenty takes 2 to 10 times as long; the first step of each way, which builds its graph, 3 times."""
    rng, n = np.random.default_rng(seed), 4128
    needed = rng.random(n) < p
    disturbed = 1 + (rng.random(n) < outliers / 200) * rng.uniform(1, 9, n)
    disturbed[:2] = 3
    mine, best = total(chosen(fused * disturbed, disturbed, twin * disturbed, needed), fused, 1.0, twin, needed)
    assert mine <= 1.05 * best


@given(**costs, at=st.integers(40, 200))
def test_it_follows_a_change_of_costs(fused: float, twin: float, seed: int, at: int) -> None:
    """A twin beside its token becomes nearly free, or twice as dear: the last of the steps go the way that is better then."""
    n, needed = at + 400, np.ones(at + 400)
    for later in (1.02, 1 + 2 * twin):
        times = np.where(np.arange(n) < at, fused, later)
        ways = chosen(times, 1.0, twin, needed)[-100:]
        assert (ways == (later < 1 + twin)).mean() >= 0.95


@given(**costs, n_runs=st.integers(1, 60), n_settings=st.integers(1, 8), length=st.integers(4, 30))
def test_a_caller_who_alternates_settings_pays_for_each_of_them_once(
    fused: float, twin: float, seed: int, n_runs: int, n_settings: int, length: int
) -> None:
    """Each setting has costs of its own. Beside 5% there are the first steps of each."""
    rng = np.random.default_rng(seed)
    window = np.repeat(rng.integers(0, n_settings, n_runs), length)
    fuse = fused * rng.uniform(0.8, 1.6, n_settings)[window]
    ways = chosen(fuse, 1.0, twin, 1, window=window)
    mine = np.where(ways, fuse, 1 + twin).sum()
    best = np.minimum(fuse, 1 + twin)
    wrong = np.maximum(fuse, 1 + twin) - best
    trials = sum(6 * wrong[window == w].max() + 4 * best[window == w].max() for w in set(window.tolist()))
    assert mine <= 1.05 * best.sum() + trials


def test_settings_that_take_turns_are_not_tried_anew() -> None:
    """A fused step is cheap with one window and dear with the other; after both were tried, no step goes the wrong way but
    for a rare second thought, of two steps."""
    window = np.arange(400) // 10 % 2
    ways = chosen(np.where(window, 2.0, 1.1), 1.0, 1.0, np.zeros(400) + (window == 0), window=window)
    wrong = ways[40:] != (window[40:] == 0)
    assert wrong.sum() <= 24, np.flatnonzero(wrong)


def test_of_very_many_settings_the_latest_are_remembered() -> None:
    """Nine in turn are one more than that: each is new every time. Eight are not."""
    for n, tries in ((8, 1), (9, 10)):
        window = np.repeat(np.tile(np.arange(n), 10), 6)
        ways = chosen(1.1, 1.0, 1.0, 1, window=window).reshape(-1, 6)
        assert ([True] * 3 + [False] * 3 == ways).all(axis=1).sum() == n * tries


@pytest.mark.parametrize("n_rows", [2, 3, 16, 64])
def test_of_several_rows_each_counts(n_rows: int) -> None:
    """Eight of ten rows need no twin: skipping them pays where a twin costs much, not where it is nearly free."""
    needed = np.random.default_rng(n_rows).binomial(n_rows, 0.2, 200)
    assert not chosen(1.5, 1.0, 1.0 / n_rows, needed, n_rows)[-50:].mean() > 0.1
    assert chosen(1.05, 1.0, 1.0 / n_rows, needed, n_rows)[-50:].mean() > 0.85


# --- the tokens ---


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"relative_top": 0.1},
        {"relative_top": 0.6, "gamma": 50},
        {"cache": "shared", "relative_top": 0.3},
        {"cache": "separate", "relative_top": 0.3},
        {"perturbation": "none", "window": 20, "relative_top": 0.3},
        {"gamma": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["llama", "qwen2vl", "gemma3", "smollm3", "stablelm", *HYBRID_ARCHS])
def test_the_tokens_do_not_depend_on_the_evaluation(arch: str, setting: dict[str, Any], tiny: Tiny, load: Load) -> None:
    if arch in HYBRID_ARCHS:
        setting = {**setting, "cache": "shared"}  # they have no second state
    answers = []
    for evaluation in ("auto", "fused", "alternate"):
        llm = load(tiny(arch), {**setting, "evaluation": evaluation})
        answers.append(greedy(llm, 40))
    assert answers[0] == answers[1] == answers[2]


def test_auto_is_the_default_and_takes_both_ways(tiny: Tiny, load: Load) -> None:
    """One token is plausible: a twin is skipped where steps alternate, from the fourth on, and evaluated before."""
    llm = load(tiny("llama"), {"relative_top": 1.0})
    assert llm.pcd.evaluation == "auto"
    llm.eval(TOKENS[:50])
    counts = []
    for token in TOKENS[50:56]:
        llm.eval([token])
        stats = llm.pcd_stats()
        counts.append((stats.n_twins, stats.n_skipped))
    assert counts == [(2, 0), (3, 0), (4, 0), (4, 1), (4, 2), (4, 3)]


@pytest.mark.parametrize("setting", [{}, {"cache": "shared"}, {"window": 20}], ids=str)
def test_rows_are_the_references_whichever_way_a_step_goes(setting: dict[str, Any], tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    llm = load(path, setting)
    llm.eval(TOKENS[:60])
    for n in range(61, 72):
        llm.eval(TOKENS[n - 1 : n])
        check_rows(llm, path, TOKENS[:n])


def test_what_has_to_be_repeatable_is_fused(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), None)
    session = Session(llm)
    for setting, evaluation in (({}, "fused"), ({"evaluation": "alternate"}, "alternate")):
        session.start(TOKENS[:20], pypcd.PCDConfig(**setting))
        assert llm.pcd.evaluation == evaluation
    session.finish()
    config = pypcd.PCDConfig(beta=1.5)
    assert config.repeatable() == config.replace(evaluation="fused") == config.repeatable().repeatable()


# --- graphs that take turns ---


def n_reused(context: Any) -> int:
    return llama_cpp.llama_perf_context(context.ctx).n_reused


ALTERNATING: list[tuple[str, dict[str, Any]]] = [
    *((arch, setting) for arch in ("llama", "gemma3") for setting in ({}, {"cache": "shared"}, {"window": 20})),
    ("llama", {"cache": "separate"}),
]


@pytest.mark.parametrize(("arch", "setting"), ALTERNATING, ids=str)
def test_alternating_uses_both_graphs_again(arch: str, setting: dict[str, Any], native: Native) -> None:
    """All within a block of 64 cells: where it is full, the twins' graph changes."""
    context = native(arch, {**setting, "evaluation": "alternate"})
    context.decode(TOKENS[:40])
    for token in TOKENS[40:42]:
        context.decode([token])
    before = n_reused(context)
    for token in TOKENS[42:62]:
        context.decode([token])
    assert n_reused(context) - before == 40


def test_automatic_steps_use_their_graphs_again_whichever_way_they_go(native: Native) -> None:
    context = native("llama", {})
    context.decode(TOKENS[:50])
    for token in TOKENS[50:52]:  # one way, then the other
        context.decode([token])
    before = n_reused(context)
    for token in TOKENS[52:72]:
        context.decode([token])
    assert n_reused(context) - before >= 20


def test_memory_of_graphs_that_take_turns_is_small_counted_and_freed(native: Native) -> None:
    def graph_bytes() -> int:
        return _native.pcd_get_stats(context.ctx).graph_bytes

    context = native("llama", {"evaluation": "fused"})
    for token in TOKENS[:9]:
        context.decode([token])
    assert graph_bytes() == 0
    assert ask(context, {"evaluation": "auto"}) == (_native.OK, "")
    context.decode(TOKENS[:90])  # a prompt takes no turns
    assert graph_bytes() == 0
    sizes = []
    for evaluation in ("alternate", "auto"):
        assert ask(context, {"evaluation": evaluation}) == (_native.OK, "")
        assert graph_bytes() == 0
        for token in TOKENS[:9]:
            context.decode([token])
        sizes.append(graph_bytes())
    one_row = 4 * (context.n_vocab + 256 * 4 * 8)  # logits, and generously what a token and its twin take at once
    assert 0 < sizes[0] < sizes[1] < 16 * one_row
    assert ask(context, {"evaluation": "fused"}) == (_native.OK, "")
    assert graph_bytes() == 0


def test_second_keys_that_are_derived_leave_the_kept_graphs_alone(native: Native) -> None:
    """They are derived in llama.cpp's own scheduler, so its own graph alone is built anew."""
    context, fused = (native("llama", {"evaluation": e}, n_seq_max=2) for e in ("alternate", "fused"))
    for one in (context, fused):
        one.decode(TOKENS[:20])
        for token in TOKENS[20:24]:
            one.decode([token])
        size = llama_cpp.llama_state_seq_get_size(one.ctx, 0)
        state = (ctypes.c_uint8 * size)()
        assert llama_cpp.llama_state_seq_get_data(one.ctx, state, size, 0) == size
        before = n_reused(one), _native.pcd_get_stats(one.ctx).n_derived
        assert llama_cpp.llama_state_seq_set_data(one.ctx, state, size, 1) == size
        for token in TOKENS[24:28]:
            one.decode([token])
        assert _native.pcd_get_stats(one.ctx).n_derived == before[1] + 1
        assert n_reused(one) - before[0] == (7 if one is context else 3)
    same_rows(context, fused)


def test_the_last_graph_is_the_one_that_was_computed_last(native: Native) -> None:
    """Also where it has a scheduler of its own."""
    sizes = {}
    for evaluation, of in (("fused", (2, 1)), ("auto", (2, 1)), ("alternate", (1, 1))):
        context = native("llama", {"evaluation": evaluation, "cache": "shared"})
        context.decode(TOKENS[:50])
        context.decode(TOKENS[50:51])
        stats = _native.pcd_get_graph_stats(context.ctx)
        assert (stats.n_tokens, stats.n_twins) == of and stats.n_splits == 1
        sizes[evaluation] = stats.bytes_out, stats.n_nodes
    assert sizes["fused"] == sizes["auto"] and sizes["fused"][0] == 2 * sizes["alternate"][0]


# --- a sliding window ---


def test_where_twins_have_no_room_after_their_tokens_they_are_fused(native: Native) -> None:
    """After a rewind the next cells of a sliding window are some that twins of sixteen tokens still see, once the tokens have
    theirs. Beside their tokens twins have room, so that no other way is needed, and the rows are those of fused ones."""
    contexts = [
        native("gemma3", {"evaluation": e}, **SHORT_SLIDING, n_seq_max=2) for e in ("auto", "fused", "alternate")
    ]

    def decode(seq: int, n: int, rows: int) -> None:
        for context in contexts:
            at = context.span(seq)[1] + 1
            assert context.decode((TOKENS * 2)[at : at + n], at, out=range(n - rows, n), seq=seq) == 0

    for n in (1, 1, 1, 2, 2, 2, 16, 16, 16):  # of each size three steps are fused, and the next three are not
        decode(0, n, n)
    for context in contexts:
        llama_cpp.llama_memory_clear(context.memory, True)
    for seq, n, rows in ((1, 30, 0), (1, 1, 1), (1, 2, 2), (1, 2, 2), (0, 16, 16), (0, 11, 0)):
        decode(seq, n, rows)
    for context in contexts:
        llama_cpp.llama_memory_seq_rm(context.memory, 1, 28, -1)
    decode(0, 16, 16)

    auto, fused, alternate = (_native.pcd_get_stats(context.ctx) for context in contexts)
    assert alternate.n_sequential == alternate.n_fallbacks == 1, "there is room, and this test shows nothing"
    assert (auto.n_fused, auto.n_alternate, auto.n_sequential, auto.n_fallbacks) == (10, 4, 0, 0)
    assert auto.n_twins == fused.n_twins == alternate.n_twins == 94
    for i in range(16):
        same_rows(contexts[0], contexts[1], i)
    decode(0, 16, 16)  # it would have alternated
    assert _native.pcd_get_stats(contexts[0].ctx).n_fused == 11


FREED = """
import sys
import pypcd, llama_cpp
def rss():
    return int(open("/proc/self/statm").read().split()[1])*4096
sizes = []
for _ in range(20):
    llm = pypcd.Llama(sys.argv[1], pcd={"evaluation": sys.argv[2]}, n_ctx=32768, n_gpu_layers=0, n_threads=1, n_threads_batch=1)
    for token in range(5, 9):
        llm.eval([token])
    one = llm.pcd_stats().second_bytes
    llm.close()
    sizes.append(rss())
print((sizes[-1] - sizes[9])/one)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the memory of a process")
@pytest.mark.parametrize("evaluation", ["auto", "alternate"])
def test_a_context_with_kept_graphs_is_freed_as_a_whole(evaluation: str, tiny: Tiny) -> None:
    """They hold copies of the context's parameters. Ten more contexts leave next to nothing: not their second keys."""
    done = run_python(FREED, tiny("llama"), evaluation, MALLOC_MMAP_THRESHOLD_="1048576")
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 4, done.stdout


def test_kept_graphs_outlive_nothing_that_they_depend_on(native: Native) -> None:
    """Rows as in a context that fuses, while positions shift, tables, second keys and attention change, and the context
    grows past a block of cells."""
    turns, fused = (native("llama", {"evaluation": e}, n_ctx=1024) for e in ("alternate", "fused"))

    def step(n: int = 3) -> None:
        for token in (TOKENS * 9)[:n]:
            for context in (turns, fused):
                assert context.decode([token]) == 0
            same_rows(turns, fused)

    def both(setting: dict[str, Any]) -> None:
        for context, evaluation in ((turns, "alternate"), (fused, "fused")):
            assert ask(context, {**setting, "evaluation": evaluation}) == (_native.OK, "")

    for context in (turns, fused):
        context.decode(TOKENS[:30])
    step(5)
    both({"alpha": 0.4})
    step()
    both({"cache": "shared", "window": 12})
    step()
    both({"window": 12, "n_sink": 0})
    step()
    both({})
    step()
    for context in (turns, fused):
        llama_cpp.llama_memory_seq_rm(context.memory, 0, 0, 4)
        llama_cpp.llama_memory_seq_add(context.memory, 0, 4, -1, -4)
    step()
    for causal in (False, True):  # llama.cpp makes its scheduler anew
        for context in (turns, fused):
            llama_cpp.llama_set_causal_attn(context.ctx, causal)
    step()
    for context in (turns, fused):
        context.decode((TOKENS * 3)[: 254 - context.span()[1]], out=[])
    step(8)
    both({"cache": "separate"})
    for context in (turns, fused):
        llama_cpp.llama_memory_clear(context.memory, True)
        context.decode(TOKENS[:30])
    step()
