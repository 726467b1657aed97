"""The benchmark measures what it says; how fast is no matter of tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf

from pypcd import PCDConfig, PCDError
from pypcd._bench import Measurement, bench, modes_for
from pypcd._cli import main

QUICK = ["--n-tokens", "2", "--rounds", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("bench") / "m.gguf", "llama")


def measure(model: Path, modes: dict[str, PCDConfig | None], *lengths: int) -> list[Measurement]:
    options = {"n_tokens": 2, "rounds": 2, "flash_attn": (False,), "n_threads": 1, "n_threads_batch": 1}
    return list(bench(str(model), modes, lengths or (16,), **options))


def test_every_mode_is_measured_at_every_length_plain_first(model: Path) -> None:
    rows = measure(model, modes_for(["stock", "two-rows", "rerotated", "shared-alternate"]), 64, 16)
    names = ("plain", "stock", "two-rows", "rerotated", "shared-alternate")
    assert [(row.n_past, row.mode) for row in rows] == [(n, name) for n in (16, 64) for name in names]
    for row in rows:
        assert row.tokens_per_second > 0 and row.ratio > 0
        assert (row.ratio == 1) == (row.mode == "plain")
        assert row.twins == (0 if row.mode in ("plain", "stock", "two-rows") else 1)
        assert (row.prefill_ratio is not None) == (row.mode in ("plain", "rerotated"))


def test_memory_is_that_of_the_cache_and_half_again_for_second_keys(model: Path) -> None:
    rows = {row.mode: row for row in measure(model, modes_for(["rerotated", "window", "separate"]))}
    assert rows["plain"].kv_bytes == 256 * 3 * 2 * 16 * 2 * 2  # cells, layers, KV heads of 16, K and V of f16
    assert rows["window"].kv_bytes == rows["plain"].kv_bytes
    assert rows["separate"].kv_bytes == pytest.approx(2 * rows["plain"].kv_bytes, rel=0.01)
    assert rows["rerotated"].kv_bytes == pytest.approx(1.5 * rows["plain"].kv_bytes, rel=0.01)


def test_a_model_sure_of_its_tokens_needs_no_twins_in_cautious_mode(model: Path) -> None:
    sure = PCDConfig(evaluation="alternate", relative_top=1.0)  # only the most probable token is plausible
    assert measure(model, {"plain": None, "sure": sure})[1].twins == 0


def test_a_text_fills_the_cache(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text.txt"
    path.write_text("some words")
    options = ["bench", str(model), "--length", "64", "--mode", "window", *QUICK, "--text"]
    assert main([*options, str(path)]) == 0
    assert "window" in capsys.readouterr().out
    path.write_text("")
    assert main([*options, str(path)]) == 1
    assert "is empty" in capsys.readouterr().err
    assert main([*options, str(tmp_path / "none.txt")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_the_stock_librarys_end_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pypcd._timing.__file__", "/nowhere.py")
    with pytest.raises(PCDError, match="the stock library ended with status 2; leave out the mode 'stock'"):
        measure(model, modes_for(["stock"]))


def test_modes_mean_what_they_say() -> None:
    modes = modes_for(["rerotated-cautious", "window-alternate", "separate-q8_0", "noise", "rerotated-w4096"])
    assert modes["rerotated-w4096"] == PCDConfig(window=4096)
    assert modes["separate-q8_0"] == PCDConfig(cache="separate", type_k_over="q8_0")
    assert modes["noise"] == PCDConfig.blog()
    assert modes["plain"] is None
    assert modes["rerotated-cautious"] == PCDConfig(evaluation="alternate", relative_top=0.1)
    assert modes["window-alternate"] == PCDConfig.windowed().replace(evaluation="alternate")
    with pytest.raises(ValueError, match="there is no mode 'fast'; allowed: plain, two-rows, stock, rerotated"):
        modes_for(["fast"])


def test_the_command_prints_json_and_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["bench", str(model), "--length", "16", "--mode", "shared", *QUICK]
    assert main([*options, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [m["mode"] for m in record["measurements"]] == ["plain", "shared"]
    assert main(options) == 0
    assert "shared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--length", "x"], 1),
        (["--length", "3"], 1),
        (["--mode", "fast"], 1),
        (["--rounds", "0"], 2),
        (["--n-tokens", "1"], 2),
        (["--threads", "-1"], 2),
    ],
)
def test_bad_options_are_refused(
    model: Path, options: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["bench", str(model), *options]) == status
    except SystemExit as exit:  # argparse's own way
        assert exit.code == status
    assert "allowed" in capsys.readouterr().err


def test_modes_that_a_model_cannot_run_are_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bloom = write_tiny_gguf(tmp_path / "bloom.gguf", "bloom")  # no RoPE
    assert main(["bench", str(bloom), "--length", "16", "--mode", "rerotated,window", *QUICK]) == 0
    out, err = capsys.readouterr()
    assert "window" in out and "rerotated" not in out
    assert "cannot run the mode rerotated" in err
