"""Hostile input ends in the right exception with a helpful message; nothing crashes or silently decodes without PCD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import TOKENS, Tiny, check_rows, run_python

import pypcd

Load = Callable[..., pypcd.Llama]


BAD_PCD: list[tuple[Any, type[Exception], str]] = [
    ("papers", ValueError, "pcd is 'papers', which is not a setting.*'paper'"),
    (1, TypeError, "pcd=1 is of the type int; allowed: bool, text such as 'unsure' .*, a mapping, PCDConfig"),
    ({"betta": 1}, TypeError, "no field 'betta'.*'beta'"),
    ({1: 2}, TypeError, "keywords must be strings|no field 1"),
]


@pytest.mark.parametrize(("value", "error", "message"), BAD_PCD, ids=[repr(value) for value, *_ in BAD_PCD])
def test_a_bad_pcd_argument_is_refused_wherever_it_is_given(
    value: Any, error: type[Exception], message: str, tiny: Tiny, load: Load
) -> None:
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
        with pytest.raises(error, match=message):
            use()
        assert llm.pcd == before
    llm.eval(TOKENS[:30])
    check_rows(llm, tiny("llama"), TOKENS[:30])


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
    for path, (error, message) in wanted.items():
        with pytest.raises(error, match=message) as caught:
            pypcd.Llama(path)
        assert "\n" not in str(caught.value)


# --- models and contexts that cannot run it ---

UNSUPPORTED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("gpt2", {}, {}, "'gpt2' has no rotary positions.*perturbation=\"none\" with a window"),
    ("mamba", {"perturbation": "none", "window": 8}, {}, "'mamba' has recurrent"),
    ("lfm2", {"cache": "separate"}, {}, "'lfm2' has recurrent layers, and a second state"),
    ("llama", {}, {"embedding": True, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_MEAN}, "pools embeddings"),
    ("llama", {}, {"attention_type": llama_cpp.LLAMA_ATTENTION_TYPE_NON_CAUSAL}, "not causal"),
]


@pytest.mark.parametrize(
    ("arch", "setting", "kwargs", "message"), UNSUPPORTED, ids=[f"{a}-{i}" for i, (a, *_) in enumerate(UNSUPPORTED)]
)
def test_what_cannot_run_pcd_says_why_and_still_runs_without(
    arch: str, setting: dict[str, Any], kwargs: dict[str, Any], message: str, tiny: Tiny, load: Load
) -> None:
    with pytest.raises(pypcd.UnsupportedError, match=message):
        load(tiny(arch), setting, **kwargs)
    llm = load(tiny(arch), False, **kwargs)
    for ask in (llm.check_pcd, lambda setting: setattr(llm, "pcd", setting)):  # what shows in a graph alone, too
        with pytest.raises(pypcd.UnsupportedError, match=message):
            ask(setting)
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
    llm.eval(TOKENS[:30])
    check_rows(llm, tiny("llama"), TOKENS[:30])
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
    [(-5, "; allowed: 0"), (2**31, "; allowed: 0"), (2**40, "; allowed: 0"), (2 * 10**9, ".* GiB, but this")],
)
def test_a_context_out_of_range_is_an_error_at_once(n_ctx: int, message: str, tiny: Tiny) -> None:
    with pytest.raises(ValueError, match=f"n_ctx is {n_ctx}{message}"):
        pypcd.Llama("demo" if "GiB" in message else tiny("llama"), n_ctx=n_ctx)


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
