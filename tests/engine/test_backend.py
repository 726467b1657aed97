"""The rows of the backend in use against the float64 reference, and against stock llama.cpp; what leaves its device.

PYPCD_TEST_BACKEND names the backend: vulkan, cuda, rpc (two servers on loopback) or cpu, as `scripts/test --backend` sets it;
without it a GPU, if the library has one, else the CPU, and only those cases are tried that are marked `few`: some hundred of all,
in which each pair of values is seen, and each setting in each evaluation with each kind of cache.

Plain rows differ from the reference by rounding: of the backend, and of the cache's types. PCD's rows may
differ by at most LIMIT times as much, in the same work with the same cache. So no limit here rests on one machine.

With PYPCD_TEST_REPORT=FILE the figures of each test are appended to FILE, a line of JSON each; `scripts/check_gpu`
makes its table from them. Heads have 64 dimensions: CUDA has no flash attention for the heads of the other tests' models.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import c_functions
import llama_cpp
import numpy as np
import pytest
from batches import decode_batch
from conftest import TOKENS, Load, Tiny, check_contrast, expected, greedy, native_row, run_python
from limits import nmse
from test_gate0 import stock_rows
from tiny_gguf import HYBRID_ARCHS, ROPE_ARCHS

import pypcd
from pypcd import engine
from pypcd.bench import left_device
from pypcd.errors import UnsupportedError
from pypcd.llama import machine

# The worst row of PCD found on a CPU differs 3.0 times as much as plain rows do (second keys of 8 bits), most differ as
# much. A wrong angle, cell or mask in one layer costs a tenth of the distance from L to L*, ten times the limit or more.
LIMIT = 10.0
SHARE = 0.1

MODELS: dict[str, dict[str, Any]] = {
    **{arch: {"arch": arch} for arch in [*ROPE_ARCHS, *HYBRID_ARCHS]},
    # with a soft cap, CUDA's flash attention takes heads of 128 dimensions or more
    "gemma2": {"arch": "gemma2", "n_head": 2},
    "bloom": {"arch": "bloom"},  # no RoPE: the window alone
    "deepseek2": {"arch": "deepseek2"},  # a latent key for all heads; unknown to the reference
    "llama-factors": {"arch": "llama", "rope_freqs": tuple(1 + i / 8 for i in range(32))},
    "llama-yarn": {"arch": "llama", "yarn": (4.0, 64)},
    "llama-f16": {"arch": "llama", "weight_type": "F16"},
    "llama-q4_0": {"arch": "llama", "weight_type": "Q4_0"},
}
SHAPE: dict[str, Any] = {"n_embd": 256, "n_head": 4, "n_ff": 256}

F16, Q8_0 = llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_Q8_0
KV: dict[str, dict[str, Any]] = {
    "f16": {"type_k": F16, "type_v": F16, "flash_attn": False},
    "f16-flash": {"type_k": F16, "type_v": F16, "flash_attn": True},
    "q8_0-keys": {"type_k": Q8_0, "type_v": F16, "flash_attn": False},
    "q8_0-flash": {"type_k": Q8_0, "type_v": Q8_0, "flash_attn": True},
}

READINGS: dict[str, dict[str, Any]] = {
    "rerotated": {},
    "shared": {"cache": "shared"},
    "separate": {"cache": "separate"},  # in the stock engine alone
    "window": {"perturbation": "none", "window": 20},
}
SETTINGS: dict[str, dict[str, Any]] = {
    **READINGS,
    "rerotated-window": {"window": 20},
    "shared-window": {"cache": "shared", "window": 20},
    "rerotated-q8_0": {"type_k_over": "q8_0"},
    "identity": {"base_ratio": 1.0},
}

BACKEND = os.environ.get("PYPCD_TEST_BACKEND") or ("gpu" if machine.has_gpu() else "cpu")
CPU: dict[str, Any] = {"n_gpu_layers": 0, "offload_kqv": False}
ON_DEVICE = ("gpu", "cuda", "vulkan", "rpc")  # where everything lies on a device: nothing of PCD's may leave it
PLACEMENTS: dict[str, dict[str, Any]] = {"cpu": CPU}
if BACKEND in ON_DEVICE:
    PLACEMENTS = {
        BACKEND: {"n_gpu_layers": -1},
        "two-layers": {"n_gpu_layers": 2},
        "keys-in-ram": {"n_gpu_layers": -1, "offload_kqv": False},
    }
HERE = next(iter(PLACEMENTS))


@pytest.fixture(scope="module", autouse=True)
def servers() -> Iterator[None]:
    """The two servers that models are spread over, where the backend is rpc; a machine without a GPU has nothing else."""
    if BACKEND != "rpc":
        yield
        return
    from rpc_servers import running

    with running() as started:
        addresses = ",".join(server.address for server in started)
        for options in PLACEMENTS.values():
            options["rpc_servers"] = addresses
        yield


# --- the work: what is evaluated, and which rows are compared: the model, their text, their index ---

PROMPT = 100
Looked = Iterator[tuple[pypcd.Llama, list[int], int]]


def steps(llm: pypcd.Llama) -> Looked:
    for n in range(PROMPT, PROMPT + 3):
        llm.eval(TOKENS[n : n + 1])
        yield llm, TOKENS[: n + 1], -1


def prompt_and_steps(load: Load) -> Looked:
    """The prompt takes four batches."""
    llm = load()
    llm.eval(TOKENS[:PROMPT])
    yield llm, TOKENS[:PROMPT], -1
    yield from steps(llm)


def every_row(load: Load) -> Looked:
    llm = load(n_batch=64, logits_all=True)
    llm.eval(TOKENS[:PROMPT])
    for i in range(0, PROMPT - 64, 5):  # of the last batch
        yield llm, TOKENS[: 64 + i + 1], i


def shifted(load: Load) -> Looked:
    """All cells moved by 37 positions: rows that depend only on distances stay."""
    llm = load()
    llm.eval(TOKENS[:PROMPT])
    llama_cpp.llama_memory_seq_add(llama_cpp.llama_get_memory(llm.ctx), 0, 0, -1, 37)
    llm.n_tokens += 37
    yield from steps(llm)


def restored(load: Load) -> Looked:
    first, llm = load(), load()
    first.eval(TOKENS[:PROMPT])
    llm.load_state(first.save_state())
    yield from steps(llm)


def sequences(load: Load) -> Looked:
    """Three texts in one batch, the first two with a common beginning; then a token of each, twice."""
    llm = load(n_seq_max=3, n_batch=192)
    texts = [TOKENS[:80], TOKENS[:20] + TOKENS[60:100], TOKENS[40:117]]
    assert decode_batch(llm, [(token, n, [0, 1], False) for n, token in enumerate(TOKENS[:20])]) == 0
    parts = [(s, n) for s, text in enumerate(texts) for n in range(0 if s == 2 else 20, len(text) - 2)]
    assert decode_batch(llm, [(texts[s][n], n, [s], False) for s, n in parts]) == 0
    for n in (-2, -1):
        assert decode_batch(llm, [(text[n], len(text) + n, [s], True) for s, text in enumerate(texts)]) == 0
        for s, text in enumerate(texts):
            yield llm, text[: len(text) + n + 1], s


WORK = {work.__name__.replace("_", "-"): work for work in (prompt_and_steps, every_row, shifted, restored, sequences)}
STEPS = "prompt-and-steps"


# --- the cases ---


class Case(NamedTuple):
    model: str
    kv: str
    setting: str
    evaluation: str
    work: str = STEPS
    placement: str = HERE
    engine: str = "native"


def cases() -> Iterator[Case]:
    for case in each_case():
        if case.setting != "separate":
            yield case
        if case.setting in READINGS and case.model not in HYBRID_ARCHS and not is_refused_by_stock(case):
            case = case._replace(engine="stock")
            if BACKEND != "gpu" or not cannot_be_followed(case):
                yield case


def is_refused_by_stock(case: Case) -> bool:
    """Second keys have no 8 bits there, and do not know the cells of sliding layers once a text was moved, which a second context does not know
    at all."""
    if case.work == "shifted" and (case.setting == "separate" or (case.model, case.setting) == ("gemma3", "rerotated")):
        return True
    return case.setting == "rerotated" and case.kv.startswith("q8_0")


def cannot_be_followed(case: Case) -> bool:
    """Second keys in the stock engine of keys in RAM, which are copied to a device before it is told of them, and of latent keys in CUDA's
    flash attention. Seen on CUDA and RPC; which device a mere "gpu" is, is not said, so there these are no cases."""
    if case.engine != "stock" or case.setting != "rerotated" or BACKEND not in ("cuda", "rpc", "gpu"):
        return False
    is_latent = (case.model, case.kv) == ("deepseek2", "f16-flash") and BACKEND != "rpc"
    return is_latent or case.placement == "keys-in-ram"


def each_case() -> Iterator[Case]:
    for placement in PLACEMENTS:
        for model in MODELS if placement != "keys-in-ram" else ("llama",):
            readings = SETTINGS if model == "llama" else ["window"] if model == "bloom" else READINGS
            for kv in KV:
                if (model, kv) == ("deepseek2", "q8_0-keys"):  # its keys hold its values
                    continue
                for setting in readings:
                    for evaluation in ("fused", "alternate"):
                        yield Case(model, kv, setting, evaluation, STEPS, placement)
    for model in ("llama", "qwen2", "gemma3", "qwen2vl", "deepseek2", *HYBRID_ARCHS):
        for work in WORK:
            for setting in READINGS:
                if work == "shifted" and (setting in ("shared", "window") or model == "qwen2vl"):
                    continue  # its angles to the shared keys, its first positions have moved; M-RoPE cannot be shifted
                if work != STEPS:
                    yield Case(model, "f16", setting, "fused", work)
                    if (model, work) != ("deepseek2", "shifted"):  # llama.cpp cannot turn its keys of 8 bits, and ends
                        yield Case(model, "q8_0-flash", setting, "alternate", work)


def few(every: Sequence[Case]) -> set[Case]:
    """Some cases that have all pairs of values which occur in a case, and all of setting, cache and evaluation."""

    def parts(case: Case) -> set[tuple[Any, ...]]:
        named = list(enumerate(case))
        return {*itertools.combinations(named, 2), ("kinds", case.setting, case.kv, case.evaluation)}

    chosen, missing = set(), set().union(*map(parts, every))
    while missing:
        best = max(every, key=lambda case: len(parts(case) & missing))
        chosen.add(best)
        missing -= parts(best)
    return chosen


EVERY = list(cases())
FEW = few(EVERY)


class Rows(NamedTuple):
    """The rows at all points of some work, float64[n_points, n_vocab]; over is None without PCD."""

    standard: np.ndarray
    over: np.ndarray | None
    texts: list[list[int]]
    graphs: list[engine.Graph]


def look(path: Path, setting: dict[str, Any] | None, kv: str, work: str, **options: Any) -> Rows:
    """The rows that the library computes; PCD's contrast is checked to be Eq. 6, and to be what callers see."""
    opened: list[pypcd.Llama] = []
    graphs: list[list[engine.Graph]] = []
    watching = contextlib.ExitStack()

    def load(**more: Any) -> pypcd.Llama:
        common = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1}
        pcd = False if setting is None else pypcd.PCDConfig(**setting)
        opened.append(pypcd.Llama(path, pcd=pcd, **{**common, **KV[kv], **options, **more}))
        graphs.append(watching.enter_context(engine.watch_graphs(opened[-1])))
        return opened[-1]

    points = []
    try:
        for llm, text, i in WORK[work](load):
            seen = native_row(llm, i)
            if setting is None:
                points.append((seen, None, text))
                continue
            got = llm.pcd_logits(i)
            assert llm.pcd is not None
            check_contrast(got, llm.pcd, seen)
            points.append((got.standard, got.local, text))
    finally:
        watching.close()
        for llm in opened:
            llm.close()
    standard, over, texts = zip(*points)
    computed = [graph for of_one in graphs for graph in of_one]
    return Rows(np.array(standard, float), None if setting is None else np.array(over, float), list(texts), computed)


def wanted(path: Path, case: Case, texts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """L and L* of some texts, from the float64 reference; for a model that it does not know, from the CPU in other
    micro-batches."""
    if case.model == "deepseek2":
        rows = look(path, SETTINGS[case.setting], case.kv, case.work, **{**CPU, "n_ubatch": 10})
        assert rows.over is not None and rows.texts == texts
        return rows.standard, rows.over
    config = pypcd.PCDConfig(**SETTINGS[case.setting])
    standard, over = zip(*(expected(path, text, len(text) - 1, config) for text in texts))
    return np.array(standard), np.array(over)


@functools.cache
def plain_rows(path: Path, case: Case) -> Rows:
    return look(path, None, case.kv, case.work, **PLACEMENTS[case.placement])


@functools.cache
def plain_error(path: Path, case: Case, other: Path) -> float:
    """How much rows without PCD differ from the expected ones. For a model that the reference does not know, at least as
    much as those of `other`, a model that it knows."""
    rows = plain_rows(path, case)
    if case.model == "deepseek2":
        less = plain_error(other, case._replace(model="llama"), other)
        cpu = look(path, None, case.kv, case.work, **{**CPU, "n_ubatch": 10})
        return max(less, nmse(rows.standard, cpu.standard))
    return nmse(rows.standard, wanted(path, case, rows.texts)[0])


def check_rows(case: Case, tiny: Tiny, note: Callable[[str, object], None]) -> None:
    """L and L* of a case are the reference's, and nothing of PCD's left the device where everything lies; `note` gets the figures."""
    path, llama = (tiny(**{**SHAPE, **MODELS[name]}) for name in (case.model, "llama"))
    setting = {**SETTINGS[case.setting], "evaluation": case.evaluation}
    rows = look(path, setting, case.kv, case.work, engine=case.engine, **PLACEMENTS[case.placement])
    standard, over = wanted(path, case, rows.texts)
    assert rows.over is not None

    # second keys may be coarser than the cache: plain rows then are those of a cache as coarse
    coarse = "type_k_over" in setting and case.kv.startswith("f16")
    kv = {"f16": "q8_0-keys", "f16-flash": "q8_0-flash"}[case.kv] if coarse else case.kv
    like = case._replace(setting="window", evaluation="fused", engine="native")  # what plain rows do not depend on
    plain = plain_error(path, like, llama)
    plain_over = plain_error(path, like._replace(kv=kv), llama)
    errors, effect = (nmse(rows.standard, standard), nmse(rows.over, over)), nmse(over, standard)
    for name, value in {**case._asdict(), "plain": plain, "plain_over": plain_over, "effect": effect}.items():
        note(name, value)
    note("standard", errors[0])
    note("over", errors[1])
    usual = [*plain_rows(path, like).graphs, *plain_rows(path, like._replace(kv=kv)).graphs]
    left = left_device(rows.graphs, usual)
    note("left", left)
    note("splits", [max(graph.n_splits for graph in graphs) for graphs in (usual, rows.graphs)])

    assert errors[0] <= LIMIT * plain, "L"
    assert errors[1] <= LIMIT * plain_over, "L*"
    if case.setting.endswith("identity"):
        assert effect < 1e-20
    else:
        assert effect * SHARE > LIMIT * plain_over, "this case could not tell L* from a wrong one"
    assert case.placement not in ON_DEVICE or not left, "operations of PCD's that the CPU ran"


# --- the tests ---


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.few] if case in FEW else [], id="/".join(case))
        for case in EVERY
        if case in FEW or "PYPCD_TEST_BACKEND" in os.environ
    ],
)
def test_rows_are_the_references_as_far_as_plain_rows_are(
    case: Case, tiny: Tiny, record_property: Callable[[str, object], None]
) -> None:
    refused = pytest.raises(UnsupportedError, match="second keys cannot follow")
    with refused if cannot_be_followed(case) else contextlib.nullcontext():
        check_rows(case, tiny, record_property)


@pytest.mark.few
@pytest.mark.skipif(BACKEND == "cpu", reason="the CPU is the backend")
@pytest.mark.parametrize("kv", KV)
def test_it_is_the_device_that_computes(kv: str, tiny: Tiny) -> None:
    """The scheduler says so."""
    path = tiny("llama", **SHAPE)
    rows = look(path, {}, kv, STEPS, **PLACEMENTS[HERE])
    for graph in rows.graphs:
        # the embeddings, and what of llama.cpp's own products with keys of 8 bits a device may not multiply
        assert sum(graph.on_cpu.values()) <= (4 if kv == "q8_0-keys" else 1) and graph.n_nodes > 10
        assert sum(graph.devices.values()) == graph.n_nodes and len(graph.devices) >= (3 if BACKEND == "rpc" else 2)
    if BACKEND != "rpc":  # its servers compute as this CPU does
        assert (rows.standard != look(path, {}, kv, STEPS, **CPU).standard).any()


@pytest.mark.few
@pytest.mark.skipif(not engine.is_native(), reason="a function of pypcd's own library")
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("place", PLACEMENTS)
def test_attention_is_read_where_it_is_computed(place: str, kv: str, tiny: Tiny, load: Load) -> None:
    """Of heads that do not begin a cell's keys: beside what numpy makes of the same keys and queries, which the stock engine's reader gets.
    A device may round queries too; that is a tenth of what another head differs by, or less."""
    common = {"engine": "native", **KV[kv], **PLACEMENTS[place]}
    llm, heads = load(tiny("llama", **SHAPE), False, **common), {0: [1, 0], 1: [3, 0]}
    llm.eval(TOKENS[:60])
    beside = engine.attention(llm, TOKENS[:60], TOKENS[60:80], [1 / 20] * 20, heads)
    assert engine.rewind(llm, 60, 0)
    for il, (own, other) in beside.items():
        got = c_functions.attention(llm, 60, TOKENS[60:80], [(il, heads[il][0])])
        assert abs(got - own).max() < abs(got - other).max() / 10
        assert engine.rewind(llm, 60, 0)


@pytest.mark.skipif(BACKEND == "rpc", reason="stock llama-cpp-python has no RPC")
def test_with_pcd_off_every_logit_is_stock_llama_cpps_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    """On this backend; the stock library has a process of its own. Beside it, one where PCD was on before."""
    common = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 32, "n_threads": 1, "n_threads_batch": 1, **PLACEMENTS[HERE]}
    runs = [(arch, {**common, **kv}) for arch in ("llama", "gemma3") for kv in KV.values()]
    found = stock_rows(tmp_path, [(tiny(arch, **SHAPE), options) for arch, options in runs])
    for (arch, options), stock in zip(runs, found):
        llm = pypcd.Llama(tiny(arch, **SHAPE), logits_all=True, **options)
        for was_on in (False, True):
            if was_on:
                llm.pcd = "paper"
                greedy(llm, 3)
                llm.pcd = False
                llm.reset()
            llm.eval(TOKENS)
            assert np.array_equal(llm.scores[: len(TOKENS)], stock["rows"])
            assert greedy(llm) == stock["greedy"].tolist()
            llm.reset()
        llm.close()


GRAPHS = """
import sys
import numpy as np
import pypcd
path, saved, *settings = sys.argv[1:]
rows = []
for engine in ("native", "stock"):
    for setting in settings:
        with pypcd.Llama(path, n_ctx=256, engine=engine, pcd=setting) as llm:
            llm.eval(range(5, 105))
            for token in range(105, 115):
                llm.eval([token])
                got = llm.pcd_logits()
                rows += [got.standard, got.local]
np.save(saved, rows)
"""


@pytest.mark.few
@pytest.mark.skipif(
    BACKEND not in ("cuda", "gpu"), reason="no other backend than CUDA records graphs; what a gpu is, is not known"
)
def test_recorded_graphs_change_no_bit(tiny: Tiny, tmp_path: Path) -> None:
    """CUDA runs a graph again from the third equal step on: our tables and second keys are in other places than what was recorded, or have
    other contents."""
    saved = [tmp_path / "with.npy", tmp_path / "without.npy"]
    for file, switch in zip(saved, ({}, {"GGML_CUDA_DISABLE_GRAPHS": "1"})):
        done = run_python(GRAPHS, tiny("llama", **SHAPE), file, "paper", "paper:cache=shared", "window", **switch)
        assert done.returncode == 0, done.stderr
    assert np.array_equal(*map(np.load, saved))
