"""Where operations ran: graphs that are watched, what counts as having left the device, and how info says so.

On a device itself tests/engine/test_backend.py holds all of PCD's operations to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import llama_cpp
import pytest
from commands import Run
from conftest import TOKENS, Tiny
from hypothesis import example, given
from hypothesis import strategies as st

import pypcd
from pypcd import engine
from pypcd.bench import left_device, placements

Load = Callable[..., pypcd.Llama]
GPU = "GPU0"


def graph(on_cpu: dict[str, int], n_nodes: int = 20, n_splits: int = 2) -> engine.Graph:
    n = sum(on_cpu.values())
    return engine.Graph(n_nodes, n_splits, Counter({GPU: n_nodes - n, "CPU": n}), Counter(on_cpu))


# --- watching ---


def test_a_graph_that_is_watched_has_each_operation_with_its_device(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    with engine.watch_graphs(llm) as graphs:
        for n in (0, 40):
            llm.eval(TOKENS[n : n + 40])
    llm.eval(TOKENS[80:81])
    assert len(graphs) == 2, "the last one was not watched"
    for found in graphs:
        assert found.devices == {"CPU": found.n_nodes} and sum(found.on_cpu.values()) == found.n_nodes
        assert found.on_cpu["MUL_MAT of ffn_out"] == found.on_cpu["ROPE of Kcur"] == 3, "one for each layer"
        assert not {name.partition(" ")[0] for name in found.on_cpu} & {"VIEW", "RESHAPE", "PERMUTE", "NONE"}
        assert found.n_splits == 1


def test_the_graphs_that_turn_second_keys_are_watched_too(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    llm.eval(TOKENS[:40])
    llm.pcd = "paper"
    with engine.watch_graphs(llm) as graphs:
        llm.eval(TOKENS[40:41])
    turning = graphs[0]
    assert turning.n_nodes == 9 and {name.split()[0] for name in turning.on_cpu} == {"GET_ROWS", "ROPE", "SET_ROWS"}
    llama_cpp.llama_memory_seq_add(llama_cpp.llama_get_memory(llm.ctx), 0, 0, -1, 3)
    llm.n_tokens += 3
    with engine.watch_graphs(llm) as graphs:
        llm.eval(TOKENS[41:42])
    assert {name.split()[0] for name in graphs[0].on_cpu} == {"GET_ROWS", "ROPE", "SET_ROWS"}, "shifted"


def test_a_model_may_be_closed_while_it_is_watched(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    with engine.watch_graphs(llm) as graphs:
        llm.eval(TOKENS[:4])
        llm.close()
    assert len(graphs) == 1


# --- what has left ---

COUNTS = st.dictionaries(st.sampled_from(["ADD of a", "ROPE of b", "MUL of c"]), st.integers(1, 5))


@given(st.lists(COUNTS, min_size=1), st.lists(COUNTS, min_size=1))
@example(ours=[{"ADD": 5}, {"ROPE": 1}, {"ROPE": 2}, {"MUL": 1}], plain=[{"MUL": 1}, {"MUL": 1, "ADD": 2}])
def test_what_left_is_how_many_more_of_each_operation_a_graph_has_than_plain_decoding(
    ours: list[dict[str, int]], plain: list[dict[str, int]]
) -> None:
    left = left_device(list(map(graph, ours)), list(map(graph, plain)))
    for name in {name for counts in [*ours, *plain] for name in counts}:
        most, usual = (max(counts.get(name, 0) for counts in some) for some in (ours, plain))
        assert left.get(name, 0) == max(most - usual, 0) and left.get(name) != 0


def test_flash_attention_that_the_device_lacks_has_not_left_it() -> None:
    flash, ours = {"FLASH_ATTN_EXT of __fattn__": 3}, {"FLASH_ATTN_EXT of node": 3, "ROPE of b": 1}
    assert left_device([graph({**flash, **ours})], [graph(flash)]) == {"ROPE of b": 1}
    assert left_device([graph(ours)], [graph({})]) == ours


def test_on_the_cpu_alone_nothing_is_said(tiny: Tiny, load: Load, run: Run) -> None:
    assert placements(load(tiny("llama"), False)) == {}
    assert "on the CPU" not in run("info", tiny("llama"))[0]


# --- as on a device: the rows of graphs are changed on their way ---


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU ran all but the embeddings, and the softmax of a window's twin."""
    watch = engine.watch_graphs

    class Watching:
        def __init__(self, llm: pypcd.Llama) -> None:
            self.llm, self.inner = llm, watch(llm)

        def __enter__(self) -> list[engine.Graph]:
            self.graphs = self.inner.__enter__()
            return self.graphs

        def __exit__(self, *_: object) -> None:
            self.inner.__exit__(None, None, None)
            windowed = self.llm.pcd is not None and self.llm.pcd.window is not None
            stay = {"GET_ROWS of embd": 1, **({"SOFT_MAX of node": 3} if windowed else {})}
            self.graphs[:] = [graph(stay, found.n_nodes, 2 + 6 * windowed) for found in self.graphs]

    monkeypatch.setattr(engine, "watch_graphs", Watching)


def test_info_names_what_left_the_device(tiny: Tiny, device: None, run: Run) -> None:
    out, _ = run("info", tiny("llama"))
    lines = [line.strip() for line in out[out.index("on the CPU") :].splitlines()]
    assert lines[1:9] == [
        f"{mode}, {how}: {'3 SOFT_MAX of node' if mode == 'window' else 'nothing'}"
        for mode in ("rerotated", "shared", "window")
        for how in ("fused", "alternate")
    ]
    assert "on the CPU" not in run("info", tiny("llama"), "--no-test")[0]


def test_what_a_model_cannot_run_is_left_out(tiny: Tiny, load: Load, device: None) -> None:
    found = placements(load(tiny("bloom"), False))
    assert list(found) == ["window, fused", "window, alternate"]
