"""Checks PCD on one model file of any architecture, against the same library with PCD off.

    python scripts/recipes/arch_checks.py MODEL [READING ...]

prints one line of JSON for the model and one for each reading: a way to make L*, the logits of the twin (rerotated,
shared, window). ggml aborts the process on some models, so use run(): it checks a model in a process of its
own, and reports a process that ended early.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy

import pypcd  # it chooses the library that llama_cpp loads, so it comes first

# isort: split
import llama_cpp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from limits import allowed_nmse, two_shapes

from pypcd.engine import _bindings as _native
from pypcd.engine import _log
from pypcd.engine._native import native_params

WINDOW = {"perturbation": "none", "window": 12}
READINGS: dict[str, dict[str, Any]] = {"rerotated": {}, "shared": {"cache": "shared"}, "window": WINDOW}

# Differences are normalised mean squared errors. Two rows of one computation differ only by rounding; Model.rounding is
# how much they may differ on this model and machine.
# What the twin must differ by for the other checks to mean anything. Some of these models hardly look at positions:
# a smaller effect counts if it is more than rounding.
MOVED = 1e-4
# Where theta* is reached another way (one rotation, not two), float32 angles differ: by this share of the effect at most,
# or by rounding. An angle, a cell or a mask that is wrong in one layer costs a tenth of it and more.
SHARE = 1e-3

LENGTH = 60  # of the text: two sliding windows of these models, and a sequence id for each token
PARTS = (32, LENGTH - 4, LENGTH)  # the batches end here
TWINS_AT = (1, 3)  # of the last batch
SHIFT = 37
ODD_OUTPUTS = "asked for the rows of some tokens of a batch, llama.cpp answers with those of others; all were asked for"

NO_SHIFT = {"lfm2": "llama.cpp aborts when it shifts keys and all attention layers slide"}

ROTATIONS = {-1: "none", 0: "norm", 2: "neox", 8: "M-RoPE", 24: "vision", 40: "IM-RoPE"}

Rows = list[np.ndarray]


class Failed(Exception):
    """llama.cpp cannot do it; the message is llama.cpp's."""


class Model:
    """A model file, possibly with changed metadata."""

    def __init__(self, path: Path, overrides: dict[str, float] | None = None) -> None:
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        entries = (llama_cpp.llama_model_kv_override * (len(overrides or {}) + 1))()  # the last one ends the list
        for entry, (key, value) in zip(entries, (overrides or {}).items()):
            entry.tag, entry.key, entry.value.val_f64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, key.encode(), value
        params.kv_overrides = entries
        _log.clear_errors()
        self.path, self.handle = path, llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise Failed(f"cannot be loaded: {_log.last_errors()}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.handle))
        self.arch = self.meta("general.architecture") or "?"

    def meta(self, key: str) -> str | None:
        value = ctypes.create_string_buffer(256)
        n = llama_cpp.llama_model_meta_val_str(self.handle, key.encode(), value, len(value))
        return value.value.decode() if n >= 0 else None

    def number(self, key: str) -> float | None:
        value = self.meta(f"{self.arch}.{key}")
        return float(value) if value and re.fullmatch(r"[-+.e\d]+", value) else None

    @functools.cached_property
    def rounding(self) -> float:
        """The limit for the difference of rows, from the difference of stock's rows for two shapes of the same work."""
        cache = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
        flash = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        try:
            alone, beside = two_shapes(self.handle, self.tokens(), flash_attn_type=flash, **cache)
        except RuntimeError as error:
            raise Failed(f"{error}: {_log.last_errors()}") from error
        return allowed_nmse(furthest(list(beside.astype(np.float64)), list(alone.astype(np.float64))))

    def tokens(self) -> list[int]:
        return np.random.default_rng(7).integers(1, self.n_vocab, LENGTH).tolist()


class Context:
    """A llama_context with an exact cache and one thread; pcd=None is llama.cpp as it is."""

    def __init__(self, model: Model, pcd: dict[str, Any] | None = None) -> None:
        p = llama_cpp.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max = 256, 256, 32, LENGTH + 1
        p.n_threads = p.n_threads_batch = 1
        p.type_k = p.type_v = llama_cpp.GGML_TYPE_F32
        p.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        p.kv_unified = True
        _log.clear_errors()
        self.model, self.handle = model, llama_cpp.llama_init_from_model(model.handle, p)
        if not self.handle:
            raise Failed(f"no context: {_log.last_errors()}")
        self.memory = llama_cpp.llama_get_memory(self.handle)
        if pcd is not None:
            status, text = self.set(pcd)
            if status != _native.OK:
                raise Failed(text)

    def set(self, pcd: dict[str, Any]) -> tuple[int, str]:
        error, params = ctypes.create_string_buffer(1000), native_params(pypcd.PCDConfig(**pcd))
        return _native.pcd_set(self.handle, ctypes.byref(params), error, len(error)), error.value.decode()

    def decode(self, tokens: Sequence[int], at: int, out: Sequence[int] = (), seq: int = 0) -> None:
        """Tokens from position `at` on, for the logits of the batch's entries `out`."""
        n, int32, seqs = len(tokens), ctypes.c_int32, (ctypes.c_int32 * 1)(seq)
        batch = llama_cpp.llama_batch(
            n,
            (int32 * n)(*tokens),
            None,
            (int32 * n)(*range(at, at + n)),
            (int32 * n)(*[1] * n),
            (ctypes.POINTER(int32) * n)(*[seqs] * n),
            (ctypes.c_int8 * n)(*(i in out for i in range(n))),
        )
        _log.clear_errors()
        status = llama_cpp.llama_decode(self.handle, batch)
        if status != 0:
            raise Failed(f"llama_decode returns {status}: {_log.last_errors()}")

    def read(self, tokens: Sequence[int], out: Sequence[int], first: int = 0, at: int = 0) -> None:
        """The text in PARTS, from the batch `first` on, for the logits `out` of the last one."""
        for a, b in list(zip((0, *PARTS), PARTS))[first:]:
            self.decode(tokens[a:b], at + a, out if b == LENGTH else ())

    def seen(self, i: int) -> np.ndarray:
        return self._row(llama_cpp.llama_get_logits_ith(self.handle, i))

    def row(self, i: int, which: int) -> np.ndarray:
        return self._row(_native.pcd_get_logits_ith(self.handle, i, which))

    def _row(self, pointer: Any) -> np.ndarray:
        if not pointer:
            raise Failed("no logits")
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,)).astype(np.float64)

    def state(self) -> Any:
        data = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(self.handle))()
        assert llama_cpp.llama_state_get_data(self.handle, data, len(data)) == len(data)
        return data

    def load(self, data: Any) -> None:
        _log.clear_errors()
        if llama_cpp.llama_state_set_data(self.handle, data, len(data)) != len(data):
            raise Failed(f"the state of the other context does not load: {_log.last_errors()}")

    def close(self) -> None:
        llama_cpp.llama_free(self.handle)


def nmse(a: Sequence[np.ndarray] | np.ndarray, b: Sequence[np.ndarray] | np.ndarray) -> float:
    """mse(a, b) / mse(b, 0); infinite where a row has none."""
    a, b = np.asarray(a), np.asarray(b)
    error = float(((a - b) ** 2).mean() / (b**2).mean())
    return error if np.isfinite(error) else float("inf")


# --- the expected L*, from llama.cpp without PCD ---
#
# With transition="none" theta* is theta of another base, so a second copy of the model, with that base in its metadata,
# rotates by theta* in stock llama.cpp. Every oracle gives the last token's row.


def rebased(model: Model, ratio: float) -> Model:
    """The same model with theta' instead of theta, in all layers that take the base from metadata."""
    if model.arch == "deepseek2-ocr":
        raise Failed("this architecture asserts its base")
    bases = {key: model.number(key) or 10000.0 for key in ("rope.freq_base", "rope.freq_base_swa")}
    other = Model(model.path, {f"{model.arch}.{key}": base * ratio for key, base in bases.items()})
    if np.array_equal(stock_rows(other, [0]), stock_rows(model, [0])):
        raise Failed("the base in this architecture's metadata changes nothing")
    return other


def oracle_window(model: Model, tokens: Sequence[int], limit: float) -> np.ndarray:
    """On a cache without the positions that the twin must not see."""
    context, last, c = Context(model), LENGTH - 1, pypcd.PCDConfig(**WINDOW)
    assert c.window
    context.decode(tokens[:last], 0)
    assert llama_cpp.llama_memory_seq_rm(context.memory, 0, c.n_sink, last + 1 - c.window)
    context.decode(tokens[last:], last, [0])
    return context.seen(0)


def oracle_shared(model: Model, tokens: Sequence[int], limit: float) -> np.ndarray:
    """With theta', on a cache made with theta."""
    standard, over, last = Context(model), Context(rebased(model, RATIO)), LENGTH - 1
    standard.decode(tokens[:last], 0)
    over.load(standard.state())
    over.decode(tokens[last:], last, [0])
    return over.seen(0)


def oracle_rerotated(model: Model, tokens: Sequence[int], limit: float) -> np.ndarray:
    """The same, but first each cached key is shifted to position 0 with theta and back to its own with theta'."""
    if model.number("block_count") == 1:  # keys come from the embeddings alone, whatever attention saw
        return oracle_separate(model, tokens, limit)
    standard, over, last = Context(model), Context(rebased(model, RATIO)), LENGTH - 1
    check_shift(model, tokens, limit)
    standard.decode(tokens[:last], 0)
    for n in range(1, last):  # one sequence each, so that equal positions stay apart
        llama_cpp.llama_memory_seq_cp(standard.memory, 0, n, n, n + 1)
        llama_cpp.llama_memory_seq_rm(standard.memory, 0, n, n + 1)
        llama_cpp.llama_memory_seq_add(standard.memory, n, 0, -1, -n)
    standard.decode(tokens[:1], 0, seq=last)  # shifts are carried out before the next token
    llama_cpp.llama_memory_seq_rm(standard.memory, last, -1, -1)
    over.load(standard.state())
    for n in range(1, last):
        llama_cpp.llama_memory_seq_add(over.memory, n, 0, -1, n)
        llama_cpp.llama_memory_seq_cp(over.memory, n, 0, -1, -1)
        llama_cpp.llama_memory_seq_rm(over.memory, n, -1, -1)
    over.decode(tokens[last:], last, [0])
    return over.seen(0)


def check_shift(model: Model, tokens: Sequence[int], limit: float) -> None:
    """Whether llama.cpp's own shift of cached keys agrees with this model's rotation; in some layers it does not."""
    shifted, fresh, last = Context(model), Context(model), LENGTH - 1
    if model.arch in NO_SHIFT:
        raise Failed(NO_SHIFT[model.arch])
    if not llama_cpp.llama_memory_can_shift(shifted.memory):
        raise Failed("llama.cpp cannot shift the keys of this architecture")
    for context, at in (shifted, 0), (fresh, SHIFT):
        context.decode(tokens[:last], at)
    llama_cpp.llama_memory_seq_add(shifted.memory, 0, 0, -1, SHIFT)
    for context in shifted, fresh:
        context.decode(tokens[last:], last + SHIFT, [0])
    if nmse(shifted.seen(0), fresh.seen(0)) > limit:
        raise Failed("llama.cpp's own shift of cached keys does not fit this architecture")


def oracle_separate(model: Model, tokens: Sequence[int], limit: float) -> np.ndarray:
    """With theta' from the first token on."""
    over, last = Context(rebased(model, RATIO)), LENGTH - 1
    over.decode(tokens[:last], 0)
    over.decode(tokens[last:], last, [0])
    return over.seen(0)


RATIO = pypcd.PCDConfig().base_ratio
ORACLES: dict[str, Callable[..., np.ndarray]] = {
    "rerotated": oracle_rerotated,
    "shared": oracle_shared,
    "separate": oracle_separate,
    "window": oracle_window,
}

# --- the checks ---


def describe(model: Model) -> dict[str, Any]:
    n_rot, n_head = model.number("rope.dimension_count"), model.number("attention.key_length")
    kind = ROTATIONS[llama_cpp.llama_model_rope_type(model.handle)]
    partial = kind != "none" and n_rot is not None and n_head is not None and n_rot < n_head
    return {"architecture": model.arch, "rotation": kind + (", partial" if partial else "")}


def stock_rows(model: Model, out: Sequence[int], at: int = 0) -> Rows:
    context = Context(model)
    context.read(model.tokens(), out, at=at)
    rows = [context.seen(i) for i in out]
    if not np.isfinite(rows).all():
        raise Failed("the logits are not finite")
    return rows


def outputs(model: Model) -> tuple[int, ...]:
    """The entries of a batch whose logits to request: all of them if llama.cpp returns the rows of others."""
    every = tuple(range(PARTS[-1] - PARTS[-2]))
    all_rows, asked = stock_rows(model, every), stock_rows(model, TWINS_AT)
    if not np.any(all_rows):
        raise Failed("computes no logits")
    return TWINS_AT if furthest([all_rows[i] for i in TWINS_AT], asked) <= model.rounding else every


def furthest(a: Rows, b: Rows) -> float:
    return max(map(nmse, a, b))


def check(model: Model, reading: str, out: Sequence[int]) -> dict[str, Any]:
    """The result of one reading: refused and why, or the numbers of each check."""
    setting, tokens = READINGS[reading], model.tokens()
    far = setting if reading == "window" else {**setting, "transition": "none"}  # what the oracles can compute
    still = {**setting, "window": 10**6} if reading == "window" else {**setting, "base_ratio": 1.0}

    asked = Context(model)
    status, text = asked.set(setting)
    if status != _native.OK:
        return {"status": "refused", "sentence": text}
    asked.close()

    def rows(pcd: dict[str, Any], at: int = 0, later: bool = False) -> tuple[Rows, Rows]:
        """L and L*; `later`: PCD is turned on before the last batch."""
        context, first = Context(model, None if later else pcd), 0
        if later:
            first = len(PARTS) - 1
            for a, b in list(zip((0, *PARTS), PARTS))[:first]:
                context.decode(tokens[a:b], a)
            assert context.set(pcd) == (_native.OK, "")
        context.read(tokens, out, first, at)
        both = tuple([context.row(i, which) for i in out] for which in (0, 1))
        context.close()
        return both

    want = stock_rows(model, out)
    standard, over = rows(setting)
    standard_far, over_far = rows(far)
    result: dict[str, Any] = {
        "moved": min(map(nmse, over, want)),
        "moved_far": min(map(nmse, over_far, want)),
        "standard": max(furthest(standard, want), furthest(standard_far, want)),
        "identity": furthest(*reversed(rows(still))),
        "alternate": max(map(furthest, rows({**far, "evaluation": "alternate"}), (standard_far, over_far))),
        "later": max(map(furthest, rows(far, later=True), (standard_far, over_far))),
    }
    limit = max(SHARE * nmse(over_far[-1], want[-1]), model.rounding)

    def relative() -> float:
        if reading in ("shared", "window"):
            raise Failed("angles to cached keys, or the first positions it sees, are not relative")
        if furthest(stock_rows(model, out, at=SHIFT), want) > limit:
            raise Failed("positions of this architecture are not relative")
        return furthest(rows(far, at=SHIFT)[1], over_far)

    tries = {"oracle": lambda: nmse(over_far[-1], ORACLES[reading](model, tokens, limit)), "relative": relative}
    for name, function in tries.items():
        try:
            result[name] = function()
        except Failed as error:
            result[f"no_{name}"] = str(error)
    wrong = faults(result, model.rounding)
    return {"status": "wrong", "wrong": wrong, **result} if wrong else {"status": "supported", **result}


def faults(result: dict[str, Any], rounding: float) -> list[str]:
    """The checks that a reading fails, if rows of one computation may differ by `rounding`."""
    effect = result["moved_far"]
    passed = {
        "standard": result["standard"] <= rounding,
        "identity": result["identity"] <= rounding,
        "moved": max(result["moved"], effect) >= MOVED or effect > rounding,
        "alternate": result["alternate"] <= rounding,
        "later": result["later"] <= rounding,
        "oracle": result.get("oracle", 0.0) <= max(SHARE * effect, rounding),
        "relative": result.get("relative", 0.0) <= max(SHARE * effect, rounding),
    }
    return [name for name, ok in passed.items() if not ok]


# --- a process for each model ---


def run(path: Path, readings: Sequence[str] | None = None, timeout: float = 120) -> dict[str, Any]:
    """The results of a model file. A reading that ends the process is "crashed", and the others are run again."""
    left = list(READINGS if readings is None else readings)
    result: dict[str, Any] = {
        "file": path.name,
        "architecture": path.stem.rsplit("-", 1)[0],
        "stock": {},
        "readings": {},
    }
    while True:
        command = [sys.executable, __file__, str(path), *left]
        path_list = [str(Path(pypcd.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(filter(None, path_list))}
        try:
            done = subprocess.run(command, env=env, text=True, capture_output=True, timeout=timeout, check=False)
            code, output, errors = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as expired:
            code, output, errors = None, (expired.stdout or b"").decode(), ""
        for line in filter(None, output.splitlines()):
            got = json.loads(line)
            reading = got.pop("reading", None)
            if reading is None:
                result.update(got)
            else:
                result["readings"][reading] = got
                left.remove(reading)
        if code == 0:
            return result
        crash = f"{ending(code)}: {last_words(errors)}" if code is not None else f"no end after {timeout:g} s"
        if not output:
            result["stock"] = {"error": crash}
            return result
        result["readings"][left.pop(0)] = {"status": "crashed", "error": crash}
        if not left:
            return result


def ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def last_words(errors: str) -> str:
    """The assertion that ended a process, or its last line, without the path of the source."""
    lines = [line for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line or ".cpp:" in line or ".c:" in line]
    return re.sub(r"\S*/(?=[\w.-]+:\d+)", "", (told or lines or [""])[-1])


def main(path: Path, readings: Sequence[str]) -> None:
    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    try:
        model = Model(path)
        out = outputs(model)
        say(**describe(model), stock={} if out == TWINS_AT else {"note": ODD_OUTPUTS})
    except Failed as error:
        say(stock={"error": str(error)})
        return
    for reading in readings:
        try:
            say(reading=reading, **check(model, reading, out))
        except Failed as error:
            say(reading=reading, status="wrong", wrong=["decode"], error=str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(READINGS))
