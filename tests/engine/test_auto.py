"""evaluation="auto": its rule, and graphs that take turns."""

from __future__ import annotations

import itertools
from typing import Any

import llama_cpp
import pytest
from batches import OK, Native, decode_batch, decode_in, same_rows, set_seq, turn_on
from conftest import TOKENS, Load, Tiny

import pypcd
from pypcd.decode import Session

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


def test_memory_of_graphs_that_take_turns_is_small_counted_and_freed(native: Native) -> None:
    def graph_bytes() -> int:
        return context.stats.graph_bytes

    context = native("llama", {"evaluation": "fused"})
    for token in TOKENS[:9]:
        context.decode([token])
    assert graph_bytes() == 0
    turn_on(context, {"evaluation": "auto", **CUT})
    context.decode(TOKENS[:90])  # a prompt takes no turns
    assert graph_bytes() == 0
    one_row = 4 * (context.n_vocab + 256 * 4 * 8)  # logits, and generously what a twin takes
    for evaluation in ("alternate", "auto"):
        turn_on(context, {"evaluation": evaluation, **FLOOR})
        assert graph_bytes() == 0
        for token in TOKENS[:9]:
            context.decode([token])
        assert 0 < graph_bytes() < 16 * one_row
    turn_on(context, {"evaluation": "fused"})
    assert graph_bytes() == 0


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
