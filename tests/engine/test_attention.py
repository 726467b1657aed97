"""How much attention tokens pay, read beside flash attention and without it: against the float64 reference and llama.cpp's own weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import c_functions
import llama_cpp
import numpy as np
import own_process
import pytest
from conftest import TOKENS, UNKNOWN, Load, Tiny, Watched, close, native_row, reference, shape, tolerance
from limits import allowed
from preload import needs_preload
from tiny_gguf import ARCHS, ATTENTION_ARCHS

import pypcd
from pypcd import engine
from pypcd.errors import UnsupportedError
from research.tensors import tap

N_PAST, TEXT = 40, TOKENS[:60]
SMALL = [token % 128 for token in TEXT]  # for llama.cpp's own test models
WEIGHTS = [0, 0, 1, 0.5, 0.5, *[1] * 14, 0]
ENGINES = ["native", "stock"] if engine.is_native() else ["stock"]
Q8, Q4 = ({"type_k": kind, "type_v": kind, "flash_attn": True} for kind in (8, 2))  # ggml's numbers

engines = pytest.mark.parametrize("kind", ENGINES)
native = pytest.mark.skipif(not engine.is_native(), reason="a function of pypcd's own library")


def read(llm: pypcd.Llama, heads: Any = None, text: list[int] = TEXT) -> dict[int, np.ndarray]:
    """What the text's last tokens pay; sequence 0 holds what is before them."""
    return engine.attention(llm, text[:N_PAST], text[N_PAST:], WEIGHTS, heads)


def wanted(path: Path) -> dict[int, np.ndarray]:
    """The same of the layers that see all positions, by the reference."""
    ref = reference(path, cpu_rounding=True)
    layers = [i for i in range(ref.n_layer) if f"blk.{i}.shortconv.conv.weight" not in ref._w]  # those with attention
    all_paid = ref.trace(TEXT).attention
    return {
        il: np.einsum("t,htp->hp", WEIGHTS, pays[:, N_PAST:])
        for il, pays in enumerate(all_paid)
        if layers[il] not in ref.sliding
    }


def check(llm: pypcd.Llama, path: Path, got: dict[int, np.ndarray]) -> None:
    expected = wanted(path)
    assert sorted(got) == sorted(expected)
    for il, sums in expected.items():
        assert got[il].dtype == np.float32 and got[il].shape == sums.shape
        close(got[il], sums, tolerance(path, of=sums, **shape(llm)))


# -- the numbers ---------------------------------------------------------------------------------------------------------


@engines
@pytest.mark.parametrize("f16", [False, True])
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("arch", [arch for arch in (*ATTENTION_ARCHS, "lfm2") if arch not in UNKNOWN])
def test_it_is_the_references(arch: str, flash_attn: bool, f16: bool, kind: str, tiny: Tiny, load: Load) -> None:
    """Soft-capped, with ALiBi, M-RoPE and windows, which the layers that have one are left out for."""
    path = tiny(arch)
    llm = load(path, False, flash_attn=flash_attn, f16=f16, engine=kind)
    llm.eval(TEXT[:N_PAST])
    got = read(llm)
    check(llm, path, got)
    if ARCHS[arch].recurrent:
        return  # it cannot be rewound
    assert engine.rewind(llm, N_PAST, 0)
    last, n_heads = max(got), len(got[max(got)])
    some = {min(got): [0], last: [n_heads - 1, 0]}
    part = read(llm, some)
    assert list(part) == sorted(some)
    for il, heads in some.items():
        close(part[il], got[il][heads], 1e-5)


@engines
@pytest.mark.parametrize(("types", "limit"), [(Q8, 0.02), (Q4, 0.3)])
def test_keys_and_values_in_blocks(types: dict[str, Any], limit: float, kind: str, tiny: Tiny, load: Load) -> None:
    """In the first layer the keys alone are rounded: llama.cpp has the same weights, if values are not in blocks."""
    path = tiny("llama", n_embd=128)
    llm = load(path, False, **types, engine=kind)
    llm.eval(TEXT[:N_PAST])
    got = read(llm)
    for il, sums in wanted(path).items():
        close(got[il], sums, limit * sums.max())
    if kind == "native":
        plain = load(path, False, type_k=types["type_k"])
        close(got[0], tapped(plain)[0], limit * got[0].max())


def tapped(llm: pypcd.Llama, text: list[int] = TEXT) -> list[np.ndarray]:
    """The same of an empty context, from llama.cpp's own weights, in the order of the layers."""
    llm.eval(text[:N_PAST])
    with tap(llm, ["kq_soft_max"]) as seen:
        llm.eval(text[N_PAST:])
    names = sorted(seen, key=lambda name: int(name.rpartition("-")[2]))
    return [np.einsum("t,htp->hp", WEIGHTS, np.concatenate(seen[name], axis=2)[0])[:, : len(TEXT)] for name in names]


# -- cells are not positions ---------------------------------------------------------------------------------------------


def beside(llm: pypcd.Llama, folder: Path) -> None:
    """Others hold cells before, between and behind those of sequence 0, and some of its own."""
    for begin in range(0, N_PAST, 10):
        assert engine.decode(llm, [(5 + i, begin // 2 + i, 1, False) for i in range(5)])
        llm.eval(TEXT[begin : begin + 10])
        if begin == 10:
            engine.copy_sequence(llm, 0, 2)
    engine.rewind(llm, 7, 1)


def rewound(llm: pypcd.Llama, folder: Path) -> None:
    """Freed cells are used again, so positions go up and down."""
    llm.eval([*TEXT[:12], *TOKENS[90:98]])
    assert engine.decode(llm, [(7, i, 1, False) for i in range(6)])
    assert engine.decode(llm, [(7, 20 + i, 0, False) for i in range(12)])
    assert engine.rewind(llm, 12, 0)
    llm.n_tokens = 12
    llm.eval(TEXT[12:20])
    engine.rewind(llm, 0, 1)
    llm.eval(TEXT[20:N_PAST])


def restored(llm: pypcd.Llama, folder: Path) -> None:
    """Behind other tokens, and where it was: the cells of a window's layers begin elsewhere."""
    llm.eval(TEXT[:N_PAST])
    engine.save_sequence(llm, str(folder / "state"), TEXT[:N_PAST])
    engine.clear(llm)
    assert engine.decode(llm, [(5, i, 1, False) for i in range(9)])
    llm.load_sequence(folder / "state", TEXT[:N_PAST])


with_gemma3 = pytest.mark.skipif("gemma3" in UNKNOWN, reason="this llama.cpp does not run the model")

HISTORIES: list[Callable[[pypcd.Llama, Path], None]] = [beside, rewound, restored]


@engines
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("arch", [arch for arch in ("llama", "gemma3", "qwen2vl") if arch not in UNKNOWN])
def test_whatever_was_done_before_layers_and_numbers_are_the_same(
    arch: str, history: Any, flash_attn: bool, kind: str, tiny: Tiny, load: Load, tmp_path: Path
) -> None:
    """Also in questions longer than a micro-batch."""
    path = tiny(arch)
    llm = load(path, False, flash_attn=flash_attn, engine=kind, n_seq_max=3, n_batch=16, n_ubatch=8)
    history(llm, tmp_path)
    check(llm, path, read(llm))


@with_gemma3
@engines
@pytest.mark.parametrize("history", HISTORIES)
def test_layers_whose_window_holds_all_are_read_too(
    history: Any, kind: str, tiny: Tiny, load: Load, tmp_path: Path
) -> None:
    """Or refused, if their cells have another order: never numbers of other positions."""
    path = tiny("gemma3", sliding_window=64)
    llm = load(path, False, flash_attn=True, engine=kind, n_seq_max=3, swa_full=False)
    history(llm, tmp_path)
    ref = reference(path, cpu_rounding=True).trace(TEXT).attention
    try:
        got = read(llm)
    except UnsupportedError as error:
        assert "sliding windows cannot be read beside this text" in str(error)
        return
    assert sorted(got) == [0, 1, 2]
    for il, pays in enumerate(ref):
        sums = np.einsum("t,htp->hp", WEIGHTS, pays[:, N_PAST:])
        close(got[il], sums, tolerance(path, of=sums, **shape(llm)))


BY_ENGINE = {"native": "paper:type_k_over=f16", "stock": "paper:cache=separate"}  # the settings that it alone runs


@pytest.mark.parametrize(
    ("kind", "setting"),
    [(kind, one) for kind in ENGINES for one in ("paper", "window", "paper:cache=shared", BY_ENGINE[kind])],
)
def test_it_does_not_depend_on_pcd(setting: str, kind: str, tiny: Tiny, load: Load) -> None:
    path = tiny("llama")
    llm = load(path, setting, engine=kind)
    llm.eval(TEXT[:N_PAST])
    before = llm.pcd_stats().n_twins
    check(llm, path, read(llm))
    assert llm.pcd_stats().n_twins == before and engine.rewind(llm, N_PAST, 0)
    llm.eval(TEXT[N_PAST:])
    assert llm.pcd_logits().local is not None


@with_gemma3
def test_a_window_that_has_moved_on_cannot_be_rewound(tiny: Tiny, load: Load, tmp_path: Path) -> None:
    """What a restored window does not hold would be missing without a word."""
    llm = load(tiny("gemma3"), False, swa_full=False, n_ctx=1024)
    text = (TOKENS * 3)[:300]
    llm.eval(text)
    engine.save_sequence(llm, str(tmp_path / "state"), text)
    llm.load_sequence(tmp_path / "state", text)
    assert engine.rewind(llm, 300, 0)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_pos_min(memory, 0) > 100
    assert not engine.rewind(llm, 100, 0) and llama_cpp.llama_memory_seq_pos_max(memory, 0) == 299
    assert engine.rewind(llm, 0, 0)


# -- in C ----------------------------------------------------------------------------------------------------------------


@native
@pytest.mark.parametrize("how", [{}, {"flash_attn": True, "f16": True}, {"n_ubatch": 7}])
@pytest.mark.parametrize("arch", [arch for arch in (*ATTENTION_ARCHS, "lfm2") if arch not in UNKNOWN])
def test_what_llama_server_reads_is_the_references(arch: str, how: dict[str, Any], tiny: Tiny, load: Load) -> None:
    """The average over the tokens, of heads of several layers together."""
    path = tiny(arch)
    llm, ref = load(path, False, **how), reference(path, cpu_rounding=True)
    llm.eval(TEXT[:N_PAST])
    attention = ref.trace(TEXT).attention
    heads = [(il, head) for il in wanted(path) for head in range(0, len(attention[il]), 2)]
    expected = sum(attention[il][head, N_PAST:].mean(axis=0) for il, head in heads)
    got = c_functions.attention(llm, N_PAST, TEXT[N_PAST:], heads)
    close(got, expected, tolerance(path, of=expected, **shape(llm)))


@native
def test_a_shift_that_waits_still_turns_second_keys(tiny: Tiny, load: Load) -> None:
    """llama.cpp shifts keys at the next evaluation, which may be that of a question whose attention is read."""
    rows = []
    for reads in (False, True):
        llm = load(tiny("llama"), "paper")
        llm.eval(TEXT[:N_PAST])
        memory = llama_cpp.llama_get_memory(llm.ctx)
        llama_cpp.llama_memory_seq_rm(memory, 0, 4, 20)
        llama_cpp.llama_memory_seq_add(memory, 0, 20, -1, -16)
        if reads:
            c_functions.attention(llm, N_PAST - 16, TEXT[:3], [(0, 0), (1, 1)])
            llama_cpp.llama_memory_seq_rm(memory, 0, N_PAST - 16, -1)
        llm.n_tokens = N_PAST - 16
        llm.eval(TEXT[:1])
        rows.append(llm.pcd_logits())
    assert np.array_equal(rows[0].local, rows[1].local) and np.array_equal(rows[0].standard, rows[1].standard)


# -- every architecture --------------------------------------------------------------------------------------------------

FOLDER = Path(os.environ.get("PYPCD_ARCH_MODELS", "models"))
FILES = json.loads((Path(__file__).parents[2] / "docs/lab/architectures.json").read_text())["models"]
# with caches of a second kind, whose cells libllama's part does not tell: llama-server finds by keyword search there, and says so
UNKNOWN_CACHES = {
    f"{name}-moe.gguf"
    for name in ("dots3note", "deepseek32", "glm-dsa", "glm5-next", "minimax-m3", "hy_v4", "qwen4exp")
}


@pytest.mark.skipif(not engine.is_native(), reason="llama.cpp's own weights are read by pypcd's library")
@pytest.mark.parametrize("file", [model["file"] for model in FILES])
def test_on_every_architecture_of_llama_cpp(file: str, load: Load) -> None:
    """Within what flash attention itself moves; or it is refused in words. PYPCD_ARCH_MODELS names the folder of models that
    scripts/recipes/arch_models makes."""
    if not FOLDER.is_dir():
        pytest.skip("PYPCD_ARCH_MODELS does not name the folder of models")
    how = {"n_ctx": 128, "f16": True}
    plain, flash = (load(FOLDER / file, False, flash_attn=on, **how) for on in (False, True))
    found, errors = [], []
    try:
        engine.check_decoder(plain)
    except UnsupportedError:
        return
    rows = []
    for llm in (plain, flash):
        llm.eval(SMALL[:N_PAST])
        rows.append(native_row(llm))
        try:
            found.append(read(llm, text=SMALL))
        except UnsupportedError as error:
            errors.append(str(error))
    assert all("cannot be read" in error for error in errors)
    if errors:
        return
    engine.clear(plain)
    own = tapped(plain, SMALL)
    moved = allowed(float(np.abs(rows[1] - rows[0]).max() / np.abs(rows[0]).max()), 1.0)
    for il, sums in found[0].items():
        close(sums, own[il], 1e-3)
    for il, sums in found[1].items():
        close(sums, own[il], max(1e-2, moved) * own[il].max())
    engine.clear(flash)
    flash.eval(SMALL[:N_PAST])
    heads = [(il, 0) for il in found[1]]
    if file in UNKNOWN_CACHES:
        with pytest.raises(UnsupportedError, match="cannot be read in this context"):
            c_functions.attention(flash, N_PAST, SMALL[N_PAST:], heads)
        return
    in_c = c_functions.attention(flash, N_PAST, SMALL[N_PAST:], heads)
    engine.clear(flash)
    flash.eval(SMALL[:N_PAST])
    n = len(SMALL) - N_PAST
    in_python = engine.attention(flash, SMALL[:N_PAST], SMALL[N_PAST:], [1 / n] * n)
    close(in_c, sum(pays[0] for pays in in_python.values()), 1e-4)


# -- what cannot be read -------------------------------------------------------------------------------------------------


@engines
def test_an_error_in_the_callback_is_raised(kind: str, tiny: Tiny, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(tiny("llama"), False, engine=kind, flash_attn=True)
    llm.eval(TEXT[:N_PAST])
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr("pypcd.engine._attention._scores", lambda *args: 1 / 0)
        read(llm)
    assert engine.rewind(llm, N_PAST, 0)
    check(llm, tiny("llama"), read(llm))
    llm.eval(TEXT[N_PAST:])


def read_in_c(llm: pypcd.Llama, heads: dict[int, list[int]]) -> np.ndarray:
    return c_functions.attention(llm, N_PAST, TEXT[N_PAST:], [(il, h) for il, some in heads.items() for h in some])


@pytest.mark.parametrize("how", [*ENGINES, *(["C"] if engine.is_native() else [])])
@pytest.mark.parametrize(
    ("arch", "heads", "said"),
    [
        *((arch, heads, "the attention of this model cannot be read in this context")
          for arch, heads in (("mamba", {0: [0]}), ("llama", {3: [0]}), ("gemma2", {0: [0]}))),
        ("llama", {1: [9]}, r"layer 1 of this model has 4 heads, so its heads? \[?9\]? cannot be read"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(arch: str, heads: Any, said: str, how: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny(arch), False, engine="native" if how == "C" else how)
    llm.eval(TEXT[:N_PAST])
    with pytest.raises(UnsupportedError, match=said):
        (read_in_c if how == "C" else read)(llm, heads)


@engines
def test_a_context_without_room_says_so(kind: str, tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False, engine=kind)
    text = (TOKENS * 3)[:250]
    llm.eval(text)
    with pytest.raises(UnsupportedError, match="no room for the question"):
        engine.attention(llm, text, TEXT[:20], [1] * 20)


FAILING = """
import ctypes
sys.path.append(sys.argv[3])
import c_functions
fail_at = ctypes.CDLL(sys.argv[2]).preload_fail_at
fail_at.restype, fail_at.argtypes = ctypes.c_long, [ctypes.c_long]
llm = new(n_gpu_layers=0)
llm.eval(list(range(3, 33)))

def pays():
    pypcd.engine.rewind(llm, 30)
    return c_functions.attention(llm, 30, [9, 8, 7], [(0, 0), (1, 2)])

wanted, n_failed, n, done = pays(), 0, 0, False
while not done:
    fail_at(n)
    try:
        pays()
    except (pypcd.PCDError, MemoryError):
        n_failed += 1
    done = fail_at(-1) >= 0
    assert (pays() == wanted).all(), n
    n += 1
assert n_failed > 10, n_failed
"""


@native
@needs_preload
def test_whichever_allocation_fails_the_next_question_is_read(tiny: Tiny, preload: Path) -> None:
    """llama.cpp builds a batch of its own before it is pypcd's turn."""
    support = Path(c_functions.__file__).parent
    own_process.run(tiny("llama"), FAILING, preload, support, LD_PRELOAD=str(preload), stderr="(?s).*")


@engines
def test_a_context_that_is_watched_already_refuses(kind: str, tiny: Tiny, load: Load) -> None:
    """Also the stock engine's over-rotation."""
    if kind == "native":
        llm = load(tiny("llama"), False, engine=kind)
        llm.eval(TEXT[:N_PAST])
        with tap(llm, ["l_out"]), pytest.raises(UnsupportedError, match="a callback already.*only one"):
            read(llm)

    with Watched(tiny("llama"), n_ctx=256, engine=kind) as watched:
        watched.eval(TEXT[:N_PAST])
        with pytest.raises(UnsupportedError, match="a callback already.*only one"):
            read(watched)
        if kind == "stock":
            with pytest.raises(UnsupportedError, match="a callback already.*only one"):
                watched.pcd = "paper"
