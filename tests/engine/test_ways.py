"""The ways in which a batch is evaluated: fused where it was asked for, whatever limits a context has; the rule of "auto", and graphs
that take turns; what remains in memory when an evaluation fails; and that no other way is taken without a count and a line in the log.

Batches are passed to llama_decode directly. The expected rows are those of the same sequences alone."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp
import pytest
from batches import (
    CACHES,
    EVALUATIONS,
    OK,
    SHORT_SLIDING,
    Abort,
    Context,
    Native,
    Rows,
    Setting,
    ask,
    decode_batch,
    decode_in,
    same_rows,
    set_seq,
    text_of,
    turn_on,
)
from conftest import SANITIZED, TOKENS, Load, Tiny, close, contrasted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_process import run
from tiny_gguf import write_tiny_gguf

import pypcd
from pypcd.engine import _log

NARROW = 2  # of enum llama_pcd_fallback
LFM2 = ("lfm2", {})
SLIDING = ("gemma3", {**SHORT_SLIDING, "n_ubatch": 128})


def rows_alone(context: Context, texts: Sequence[list[int]], first: int) -> list[list[Rows]]:
    """L and L* of each text's tokens from `first` on, decoded token by token as the only sequence there is."""
    res = []
    for text in texts:
        llama_cpp.llama_memory_clear(context.memory, True)
        if first:
            decode_in([context], text[:first], 0, out=[])
        res.append([])
        for p in range(first, len(text)):
            decode_in([context], text[p : p + 1], p)
            res[-1].append(context.rows())
    return res


# --- fused, whatever the limits ---


@pytest.mark.parametrize("n", [3, 70])
@pytest.mark.parametrize("model", [("llama", {}), LFM2, SLIDING, ("gemma3", {"swa_full": True})], ids=lambda m: m[0])
def test_a_step_of_n_sequences_is_fused_and_its_graph_used_again(
    model: tuple[str, dict[str, Any]], n: int, native: Native
) -> None:
    """With as many outputs as a server asks for: one for each sequence. The texts are longer than a sliding window."""
    arch, params = model
    n_first, n_steps = 24, 4
    texts = [text_of(s, n_first + n_steps) for s in range(n)]
    wide = {**params, "n_ctx": max(256, 64 * n), "n_ubatch": 128}
    together = native(arch, {"evaluation": "fused"}, **{**wide, "n_seq_max": n, "n_outputs_max": n})
    for s, text in enumerate(texts):
        decode_in([together], text[:n_first], 0, out=[], seq=s)
    llama_cpp.llama_perf_context_reset(together.ctx)
    expected = rows_alone(native(arch, {}, **wide), texts, n_first)
    for k in range(n_steps):
        assert (
            decode_batch(together, [(text[n_first + k], n_first + k, [s], True) for s, text in enumerate(texts)]) == 0
        )
        for s in range(n):
            same_rows(together, expected[s][k], s)
    stats, n_parts = together.stats, -(-n // 64)
    assert (stats.n_tokens, stats.n_twins) == (n * n_steps, n * n_steps)
    if n_parts == 1 or arch != "lfm2":  # states of two parts lie in different places, which graphs have built in
        assert together.n_reused >= n_parts * n_steps - 2  # not the first one, nor one that has more cells than before
    assert (stats.n_fused, stats.n_fallbacks) == (n_parts * n_steps, 0)


@pytest.mark.parametrize("limit", [1, 3, 7])
@pytest.mark.parametrize("evaluation", [*EVALUATIONS, "auto"])
def test_a_limit_of_outputs_holds_for_the_callers_own(evaluation: str, limit: int, native: Native) -> None:
    setting = {"evaluation": evaluation}
    limited, free = native("llama", setting, n_outputs_max=limit), native("llama", setting)
    for start, stop in ((0, 30), (30, 30 + limit), (30 + limit, 60)):
        out = range(stop - start - limit, stop - start)
        decode_in((limited, free), TOKENS[start:stop], out=out)
        for i in out:
            same_rows(limited, free, i)
            close(limited.seen(i), free.seen(i), contrasted(free.limit, pypcd.PCDConfig().beta))
    assert (limited.stats.n_sequential, limited.stats.n_fallbacks) == (0, 0)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("put_off", ["shift", "scheduler"])
def test_what_llama_cpp_puts_off_is_done_before_there_are_twins(put_off: str, cache: str, native: Native) -> None:
    """It builds graphs for all of a context's sequences then."""
    setting = {"cache": cache, "evaluation": "fused"}
    context, few = (native("llama", setting, n_seq_max=n, n_ctx=1024) for n in (192, 1))
    decode_in((context, few), TOKENS[:30])
    for one in (context, few):
        if put_off == "shift":
            llama_cpp.llama_memory_seq_rm(one.memory, 0, 5, 10)
            llama_cpp.llama_memory_seq_add(one.memory, 0, 10, -1, -5)
        else:
            assert llama_cpp.llama_set_adapter_cvec(one.ctx, None, 0, one.n_embd, 0, 0) == 0
    decode_in((context, few), TOKENS[30:31])
    same_rows(context, few)
    assert (context.stats.n_sequential, context.stats.n_fallbacks) == (0, 0)


# --- all sequences, interleaved ---


@st.composite
def interleavings(draw: st.DrawFn) -> list[list[tuple[int, int]]]:
    """Batches of (sequence, how many of its tokens), which tokens' rows are wanted is decided by their number."""
    one = st.tuples(st.integers(0, 3), st.integers(1, 9))
    return draw(st.lists(st.lists(one, min_size=1, max_size=4, unique_by=lambda e: e[0]), min_size=3, max_size=12))


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(
    batches=interleavings(),
    evaluation=st.sampled_from(["fused", "alternate"]),
    window=st.sampled_from([None, 12]),
    start=st.integers(0, 70),
)
@pytest.mark.parametrize(
    "model", [("llama", {}), LFM2, ("gemma3", SHORT_SLIDING), ("gemma3", {**SHORT_SLIDING, "n_ubatch": 5})], ids=str
)
def test_interleaved_sequences_have_the_rows_of_each_alone(
    model: tuple[str, dict[str, Any]],
    batches: list[list[tuple[int, int]]],
    evaluation: str,
    window: int | None,
    start: int,
    native: Native,
) -> None:
    """Batches of all shapes, in a sliding-window cache that has wrapped: the rows of swa_full, sequence by sequence."""
    arch, params = model
    setting: Setting = {"evaluation": evaluation, "window": window}
    texts = [text_of(s, start + 9 * len(batches) + 1) for s in range(4)]
    context = native(arch, setting, **{"n_ctx": 1024, **params, "n_seq_max": 4, "n_outputs_max": 36})
    alone = native(arch, setting, n_ctx=1024, swa_full=True)
    done, got = [start] * 4, [{} for _ in range(4)]  # rows by position
    for s in range(4):
        for p in range(0, start, 20):
            decode_in([context], texts[s][p : min(p + 20, start)], p, out=[], seq=s)
    for sizes in batches:
        entries = [
            (texts[s][p], p, [s], (p + s) % 3 == 0 or p == done[s] + n - 1)
            for s, n in sizes
            for p in range(done[s], done[s] + n)
        ]
        assert decode_batch(context, entries) == 0
        for i, (_, p, (s,), wanted) in enumerate(entries):
            if wanted:
                got[s][p] = context.rows(i)
        for s, n in sizes:
            done[s] += n
    for s in range(4):
        expected = rows_alone(alone, [texts[s][: done[s]]], start)[0]
        for p, rows in got[s].items():
            close(rows, expected[p - start], context.limit)


# --- recurrent layers ---


def test_a_hybrid_keeps_the_callers_sequences_and_shows_what_twins_states_take(native: Native) -> None:
    context, stock = native("lfm2", n_seq_max=3), native("lfm2", n_seq_max=3)
    for s in range(3):
        decode_in((context, stock), text_of(s, 10), seq=s)
    turn_on(context, {})  # the states there are stay
    for s in range(3):
        decode_in((context, stock), text_of(s + 5, 2), seq=s)
        close(context.rows()[0], stock.seen(), context.limit)
    assert context.stats.state_bytes > 0
    assert native("llama", {}).stats.state_bytes == 0
    _log.clear_errors()
    assert context.decode([9], 0, seq=3) == -1
    assert "sequence id 3: ids from 3 on belong to PCD's twins" in _log.last_errors()


def test_as_many_sequences_as_there_are_ids_leave_none_for_a_hybrids_twins(native: Native) -> None:
    assert "n_seq_max is 255, allowed: at most 254" in ask(native("lfm2", n_seq_max=255), {})[1]
    most = native("lfm2", {}, n_seq_max=254)
    decode_in([most], TOKENS[:10], seq=253)
    alone = native("lfm2", {})
    decode_in([alone], TOKENS[:10])
    same_rows(most, alone)


def test_a_hybrid_has_more_sequences_in_a_batch_than_states_for_twins(native: Native) -> None:
    """70 and 64. No twin is needed; or all sequences share one token, which has one twin."""
    n, params = 70, {"n_seq_max": 70, "n_ctx": 1024}
    plain, stock = native("lfm2", {"gamma": 1}, **params), native("lfm2", **params)
    batch = [(5 + s, 0, [s], True) for s in range(n)]
    assert decode_batch(plain, batch) == decode_batch(stock, batch) == 0
    for s in range(n):
        close(plain.row(s), stock.seen(s), plain.limit)
    shared, alone = native("lfm2", {}, **params), native("lfm2", {})
    for p, token in enumerate(TOKENS[:20]):
        wanted = p > 15
        assert decode_batch(shared, [(token, p, list(range(n)), wanted)]) == 0
        decode_in([alone], [token], out=[0] if wanted else [])
        if wanted:
            same_rows(shared, alone)


# --- no other way without a word ---


@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_a_fallback_is_counted_and_said_once(
    evaluation: str, tiny: Tiny, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(tiny("llama"), {"evaluation": evaluation}, n_batch=256)
    llm.eval((TOKENS * 3)[:253])
    for n in range(3):
        stats = llm.pcd_stats()
        assert (stats.n_fallbacks, stats.last_fallback) == (0, "")
        llm.eval(TOKENS[n : n + 1])
    stats = llm.pcd_stats()
    assert (stats.n_fused + stats.n_alternate, stats.n_sequential, stats.n_fallbacks) == (3, 1, 1)
    assert stats.last_fallback.startswith("no free cells for twins beside their tokens")
    warned = [r for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1 and "no free cells for twins beside their tokens" in warned[0].message


def test_a_context_too_narrow_for_a_twin_says_so_once(native: Native, caplog: pytest.LogCaptureFixture) -> None:
    context, wide = native("llama", {}, n_batch=1, n_ubatch=1), native("llama", {})
    for n in range(8):
        decode_in((context, wide), TOKENS[n : n + 1])
    same_rows(context, wide)
    stats = context.stats
    assert (stats.n_fused, stats.n_sequential, stats.n_fallbacks, stats.last_fallback) == (0, 8, 8, NARROW)
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1 and "use a larger n_batch and n_ubatch" in warned[0]


# --- failures ---


def test_a_twin_that_is_aborted_leaves_a_recurrent_state_as_it_was(native: Native) -> None:
    context, fresh = (native("lfm2", {"evaluation": "alternate"}) for _ in range(2))
    twinless = native(
        "lfm2", {"evaluation": "alternate", "relative_top": 1.0}
    )  # it counts the nodes of the batch alone
    decode_in((context, twinless, fresh), TOKENS[:20])
    before, nodes, abort = context.span(), Abort(twinless), Abort(context)
    assert nodes.decode(sys.maxsize, TOKENS[20:21]) == 0
    for _ in range(2):
        assert abort.decode(nodes.n + 5, TOKENS[20:21]) == 2
        assert context.span() == before and context.seen(0) is None and context.row(0) is None
    decode_in((context, fresh), TOKENS[20:22])
    same_rows(context, fresh)


def test_states_of_a_hybrid_go_into_contexts_with_and_without_room_for_twins(native: Native) -> None:
    stock, context, fresh = (native("lfm2", on, n_seq_max=2) for on in (None, {}, {}))
    for seq, text in enumerate((TOKENS[:20], TOKENS[30:40])):
        decode_in((stock, context), text, seq=seq)
    for source in (context, stock):
        for target in (fresh, native("lfm2", n_seq_max=2)):
            target.restore(source.save())
            assert (target.span(0), target.span(1)) == (source.span(0), source.span(1))
    decode_in((context, fresh, stock), TOKENS[50:52], seq=1)
    same_rows(fresh, context)
    close(fresh.rows()[0], stock.seen(), fresh.limit)


EXHAUSTED = """
import resource
from pypcd.engine import _bindings, _log
n, spare = int(sys.argv[3]), int(sys.argv[4])
llm = new(pcd=f"paper:evaluation={sys.argv[2]}", n_ctx=1024, n_batch=1024, n_gpu_layers=0)
memory = llama_cpp.llama_get_memory(llm.ctx)
batch = llama_cpp.llama_batch_init(1024, 0, 1)
def decode(first, n, outputs):
    batch.n_tokens = n
    for i in range(n):
        batch.token[i], batch.pos[i], batch.logits[i] = 5 + i % 300, first + i, i >= n - outputs
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    return llama_cpp.llama_decode(llm.ctx, batch)
def row(i):
    p = _bindings.pcd_get_logits_ith(llm.ctx, i, 2)
    return p[:50] if p else None
assert decode(0, 20, 1) == 0
assert decode(20, 1, 1) == 0
expected = row(0)
llama_cpp.llama_memory_seq_rm(memory, 0, 20, -1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_log.clear_errors()
resource.setrlimit(resource.RLIMIT_AS, (used + (spare << 20), -1))
status = decode(20, n, n)  # its rows take 41 KiB each, once in llama.cpp and twice beside
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(status, llama_cpp.llama_memory_seq_pos_max(memory, 0), row(0), _log.last_errors())
assert decode(20, 1, 1) == 0
assert row(0) == expected, "the memory is not as it was"
"""


@pytest.mark.skipif(SANITIZED, reason="the sanitizer's allocator ends a process that runs out of memory")
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space of a process")
@pytest.mark.parametrize(("mib", "why"), [(16, ""), (64, "PCD: decoding failed: std::bad_alloc"), (116, "")])
@pytest.mark.parametrize("evaluation", EVALUATIONS)
def test_no_exception_leaves_llama_decode_where_memory_runs_out(
    evaluation: str, mib: int, why: str, tmp_path: Any
) -> None:
    """Rows for 900 tokens of a vocabulary of 10496 do not fit: a status, a line in the log, and the memory as it was. Where it runs out, in
    llama.cpp, in ours or behind both, is by how much there is."""
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama", n_vocab=10496)
    said = "\n".join(run(path, EXHAUSTED, evaluation, 900, mib, stderr="(?s).*"))
    assert said.startswith(f"-2 19 None {why}") and len(said.split()) > 3, said


# --- the rule ---

CUT, FLOOR = {"relative_top": 0.3}, {"min_entropy": 0.5}


@pytest.mark.parametrize(
    ("setting", "fuses"),
    [
        ({}, True),
        ({"window": 20}, True),
        ({"min_first_entropy": 0.5}, True),  # of the first token alone
        (CUT, False),
        (FLOOR, False),
        ({**CUT, "cache": "shared"}, False),
        ({"gamma": 1}, False),
    ],
    ids=str,
)
def test_auto_alternates_where_a_step_may_need_no_twin(setting: dict[str, Any], fuses: bool, native: Native) -> None:
    """A prompt is fused in any case: there a twin is one token more. Only gamma = 1 is known to need none."""
    context = native("llama", setting)
    counts = []
    for tokens in (TOKENS[:30], *([token] for token in TOKENS[30:34])):
        context.decode(tokens, out=[len(tokens) - 1])
        stats = context.stats
        counts.append((stats.n_fused, stats.n_alternate))
    wanted = [(1 + i, 0) if fuses else (1, i) for i in range(5)]
    assert counts == (wanted if setting != {"gamma": 1} else [(0, i) for i in range(1, 6)])


def test_one_row_that_needs_its_twin_fuses_a_step_for_all(native: Native) -> None:
    """And a step in which most tokens give no row is like a prompt."""
    context = native("llama", CUT, n_seq_max=4)
    for seq in range(4):
        context.decode(TOKENS[:20], seq=seq, out=[])

    def step(pos: int, *rows: int) -> tuple[int, int]:
        before = context.stats
        assert decode_batch(context, [(TOKENS[pos], pos, [seq], seq in rows) for seq in range(4)]) == 0
        after = context.stats
        return after.n_fused - before.n_fused, after.n_alternate - before.n_alternate

    assert step(20, 0, 1, 2, 3) == (0, 1)
    assert step(21, 0, 1) == (0, 1)
    assert step(22, 0) == (1, 0)
    assert set_seq(context, 2, {}) == OK
    assert step(23, 0, 1, 2, 3) == (1, 0)
    assert step(24, 0, 1, 3) == (0, 1)


@pytest.mark.parametrize("setting", [{}, CUT, FLOOR, {**CUT, "perturbation": "none", "window": 20}], ids=str)
def test_equal_seeds_give_equal_texts(setting: dict[str, Any], tiny: Tiny, load: Load) -> None:
    """To the bit: the way of a step follows from the setting and the batch, not from a clock, nor from what was decoded before."""
    assert pypcd.PCDConfig().evaluation == "auto"
    llm = load(tiny("llama"), setting)

    def answer() -> tuple[list[int], bytes]:
        llm.reset()
        llm.set_seed(11)
        tokens = list(itertools.islice(llm.generate(TOKENS[:40], temp=1.5, top_k=0), 40))
        return tokens, llm.pcd_logits().standard.tobytes()

    first = answer()
    for other in ({"window": 9}, {"evaluation": "alternate"}, {"evaluation": "fused"}):
        llm.pcd = pypcd.PCDConfig(**other)
        answer()
        llm.pcd = pypcd.PCDConfig(**setting)
        assert answer() == first


# --- graphs that take turns ---


ALTERNATING: list[tuple[str, dict[str, Any]]] = [
    (arch, setting) for arch in ("llama", "gemma3") for setting in ({}, {"cache": "shared"}, {"window": 20})
]


@pytest.mark.parametrize(("arch", "setting"), ALTERNATING, ids=str)
def test_alternating_uses_both_graphs_again(arch: str, setting: dict[str, Any], native: Native) -> None:
    """All within a block of 64 cells: where it is full, the twins' graph changes."""
    context = native(arch, {**setting, "evaluation": "alternate"})
    context.decode(TOKENS[:40])
    for token in TOKENS[40:42]:
        context.decode([token])
    before = context.n_reused
    for token in TOKENS[42:62]:
        context.decode([token])
    assert context.n_reused - before == 40


def test_kept_graphs_outlive_nothing_that_they_depend_on(native: Native) -> None:
    """Rows as in a context that fuses, when llama.cpp makes its scheduler anew, and when the context grows past a block of cells."""
    both = [native("llama", {"evaluation": evaluation}, n_ctx=1024) for evaluation in ("alternate", "fused")]

    def step(n: int = 3) -> None:
        for token in (TOKENS * 9)[:n]:
            decode_in(both, [token])
            same_rows(*both)

    decode_in(both, TOKENS[:30])
    step(5)
    for causal in (False, True):
        for context in both:
            llama_cpp.llama_set_causal_attn(context.ctx, causal)
    step()
    decode_in(both, (TOKENS * 3)[: 254 - both[0].span()[1]], out=[])
    step(8)
