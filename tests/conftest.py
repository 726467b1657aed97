"""Shared by all tests: loads pypcd's library before llama_cpp's own; tiny models written once, references opened once."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: its threads cost more than they give here
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
os.environ["PYPCD_CACHE_GIB"] = "0"  # the user's own is left alone
os.environ.pop("PYPCD", None)  # stock objects are what much is compared with
os.environ.setdefault("PYPCD_ENGINE", "native")  # or an error: no test runs on another library unseen

import pypcd  # it chooses the library that llama_cpp loads, so it comes first

# isort: split
import llama_cpp
import numpy as np
import pytest
from commands import research, run  # noqa: F401  fixtures
from hypothesis import settings
from limits import EPSILON, allowed, two_shapes
from preload import SANITIZED, preload  # noqa: F401  a fixture, and what tests import from here
from recorder import pytest_runtest_logreport  # noqa: F401  a hook of pytest's
from reference import Reference, behind, contrast, rho
from rpc_servers import rpc_servers  # noqa: F401  a fixture
from tiny_gguf import write_tiny_gguf

# research/ is not installed: it is imported from the clone, behind the installed package
sys.path.append(str(Path(__file__).parents[1]))

# shared by tests, and their messages are read
pytest.register_assert_rewrite("browser", "fake_pip", "serving")
settings.register_profile("pypcd", deadline=None, database=None)  # these two cores may be shared
settings.load_profile("pypcd")

Tiny = Callable[..., Path]
Load = Callable[..., pypcd.Llama]


def pytest_configure(config: pytest.Config) -> None:
    """Of several processes with tests (scripts/test) each has its own cores: ggml's threads wait for each other by spinning."""
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if not worker:
        return
    os.environ.pop("PYPCD_TEST_REPORT", None)  # the first process writes it
    for name in ("COLUMNS", "LINES"):  # readline has put them there for its children
        os.environ.pop(name, None)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(worker["workerid"][2:]) % len(cores) :: worker["workercount"]])


# tests of a few seconds a module, that start no server: `scripts/test fast`
FAST_FOLDERS = {"settings", "decode", "find"}
FAST_MODULES = {
    "balance", "cli_tune", "constraint", "context", "cpp", "decay", "docs",
    "exports", "finding", "gate0", "graphwalks", "kv", "metrics",
    "packaging", "places", "progress", "report", "import_layers", "public", "ruler", "salience", "sampler", "second_keys",
    "spectrum", "stats", "table", "tensors",
}  # fmt: skip


def is_fast(path: Path) -> bool:
    return path.parent.name in FAST_FOLDERS or path.stem.partition("_")[2] in FAST_MODULES


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m fast the other modules are not even imported, which takes longer than the fast tests."""
    is_other = collection_path.name.startswith("test_") and not is_fast(collection_path)
    return True if is_other and config.getoption("markexpr") == "fast" else None


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> None:
    """The fixtures of tests/server. In a conftest.py of its own they would be in the way of `from conftest import …`."""
    if module_path.parent.name == "server":
        name = "browser" if module_path.name.startswith("test_page") else "serving"
        parent.config.pluginmanager.import_plugin(name)  # where it skips, so does the module that imports it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_fast(item.path):
            item.add_marker("fast")


TOKENS: list[int] = [1, *np.random.default_rng(7).integers(3, 384, 119).tolist()]  # several sliding windows long
F32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}  # a cache that rounds nothing

reference = functools.cache(Reference)  # reading the tokenizer's keys takes longer than evaluating the model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """write_tiny_gguf without the path; each model is written once."""
    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def make(arch: str = "llama", **kwargs: Any) -> Path:
        key = arch + repr(sorted(kwargs.items()))
        if key not in made:
            made[key] = write_tiny_gguf(folder / f"{len(made)}.gguf", arch, **kwargs)
        return made[key]

    return make


SMALL: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": 64,
    "n_threads": 1,
    "n_threads_batch": 1,
    "n_gpu_layers": 0,
    "flash_attn": False,
}


# what ends the process without PCD too, and what llama.cpp read otherwise then
UNKNOWN = {"0.3.16": {"gemma3", "smollm3", "hunyuan-dense", "lfm2"}, "0.3.28": {"gemma3"}}.get(
    llama_cpp.__version__, set()
)

on_stock = pytest.mark.engine("stock")


@pytest.fixture
def load(request: pytest.FixtureRequest) -> Iterator[Callable[..., pypcd.Llama]]:
    """pypcd.Llama of small dimensions, closed after the test; `f16` for llama.cpp's default cache."""
    opened = []
    marked = request.node.get_closest_marker("engine")
    given = {"engine": marked.args[0]} if marked else {}

    def make(path: Path, pcd: Any = "paper", *, f16: bool = False, **kwargs: Any) -> pypcd.Llama:
        pcd = pypcd.PCDConfig().replace(**pcd) if isinstance(pcd, dict) else pcd
        opened.append(pypcd.Llama(path, pcd=pcd, **{**SMALL, **({} if f16 else F32), **given, **kwargs}))
        return opened[-1]

    yield make
    for llm in opened:
        llm.close()


class Watched(pypcd.Llama):
    """A model whose caller has given its context a callback."""

    own = llama_cpp.ggml_backend_sched_eval_callback(lambda tensor, is_asking, data: not is_asking)

    @property
    def context_params(self) -> Any:
        params = super().context_params
        params.cb_eval = self.own
        return params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        pypcd.Llama.context_params.fset(self, params)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def demo() -> Iterator[pypcd.Llama]:
    """The included model, with exact types of cache."""
    with pypcd.Llama("demo", **{**SMALL, **F32, "n_ctx": 512}) as llm:
        yield llm


@pytest.fixture
def hub(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A huggingface_hub whose repositories have one tiny model each."""

    class Hub(types.ModuleType):
        HfFileSystem = staticmethod(
            lambda: types.SimpleNamespace(ls=lambda name, **_: [f"{name}/m.gguf", f"{name}/a.md"])
        )
        hf_hub_download = staticmethod(lambda **_: str(tiny("llama")))
        validate_repo_id = staticmethod(lambda _: None)

    for name in ("huggingface_hub", "huggingface_hub.utils"):
        monkeypatch.setitem(sys.modules, name, Hub(name))


@pytest.fixture
def native(tiny: Tiny) -> Iterator[Callable[..., Any]]:
    """native(arch, setting or None, **llama_context_params): a context of batches.py."""
    from batches import Context  # which imports this

    models, opened = {}, []

    def make(arch: str, pcd: dict[str, Any] | None = None, **params: Any) -> Context:
        if arch not in models:
            p = llama_cpp.llama_model_default_params()
            p.n_gpu_layers = 0
            models[arch] = llama_cpp.llama_model_load_from_file(str(tiny(arch)).encode(), p)
        assert models[arch], arch
        opened.append(Context(models[arch], tiny(arch), pcd, **params))
        return opened[-1]

    yield make
    for context in opened:
        llama_cpp.llama_free(context.ctx)
    for model in models.values():
        llama_cpp.llama_model_free(model)


TEXTS = [(TOKENS * 7)[:n] for n in (len(TOKENS), 256, 800)]  # what limits are measured on


@functools.cache
def _stock(
    path: Path, n: int, f16: bool, flash_attn: bool, params: tuple[tuple[str, Any], ...]
) -> tuple[np.ndarray, np.ndarray]:
    """limits.two_shapes of a text of n tokens on a model file."""
    p = llama_cpp.llama_model_default_params()
    p.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), p)
    assert model, path
    try:
        cache = {} if f16 else F32
        return two_shapes(model, TEXTS[-1][:n], **{**flash(flash_attn), **cache, **dict(params)})
    finally:
        llama_cpp.llama_model_free(model)


def flash(is_on: bool) -> dict[str, Any]:
    """The context's parameter for flash attention, by its name in this version."""
    if not hasattr(llama_cpp, "LLAMA_FLASH_ATTN_TYPE_ENABLED"):  # before llama-cpp-python 0.3.17
        return {"flash_attn": is_on}
    names = "DISABLED", "ENABLED"
    return {"flash_attn_type": getattr(llama_cpp, f"LLAMA_FLASH_ATTN_TYPE_{names[is_on]}")}


def rounding(path: Path, **params: Any) -> float:
    """How much logits of this model may differ between two shapes of the same work: see limits.allowed.

    In a float32 cache without flash attention; `params` are other llama_context_params. If numbers are rounded to
    float16 on the way, an earlier difference decides how each is rounded: then `tolerance` is the limit."""
    alone, beside = _stock(path, len(TOKENS), False, False, tuple(sorted(params.items())))
    return allowed(float(np.abs(alone - beside).max()), float(np.abs(alone).max()))


def rounding_of(llm: pypcd.Llama, text: list[int]) -> float:
    """The same for a context and a text, from stock's rows for its last token: evaluated with the others, by itself, in
    two halves, and after tokens that were each evaluated by themselves. One pair of rows may agree by chance."""
    n, rows, before = len(text), [], llm.pcd
    llm.pcd = None
    for size in {n, n - 1, (n + 1) // 2, 1} - {0}:
        llm.reset()
        llm._ctx.kv_cache_clear()
        for i in range(0, n, size):
            llm.eval(text[i : i + size])
        rows.append(native_row(llm))
    llm.pcd = before
    llm.reset()
    return allowed(float(np.ptp(rows, axis=0).max()), float(np.abs(rows).max()))


def contrasted(limit: float, beta: float) -> float:
    """How much (1 + beta) L - beta L* may differ if L and L* may by `limit`. A token that is not plausible moves with the
    best one that is, with its own logit, and with the best of its kind."""
    return (3 + 2 * beta) * limit + 200 * EPSILON


def tolerance(
    path: Path,
    n: int = len(TOKENS),
    *,
    of: Any = None,
    f16: bool = False,
    flash_attn: bool = False,
    **overrides: Any,
) -> float:
    """How much logits of this model may differ from the float64 reference's, on a text of n tokens: see limits.allowed.

    A float32 angle has a relative error, so the limit is measured on a text of the same length, from TEXTS. `f16` is
    for llama.cpp's default cache. `of` are numbers from inside the model, instead of logits: the same share of their
    size."""
    params, text = tuple(sorted(overrides.items())), next(text for text in TEXTS if len(text) >= n)
    exact = _standard(path, tuple(text), params)
    worst = max(float(np.abs(rows - exact).max()) for rows in _stock(path, len(text), f16, flash_attn, params))
    scale = float(np.abs(exact).max())
    return allowed(worst, scale) * (1.0 if of is None else float(np.abs(of).max()) / scale)


@functools.lru_cache(maxsize=256)
def _standard(path: Path, tokens: tuple[int, ...], overrides: tuple[tuple[str, Any], ...]) -> np.ndarray:
    return reference(path, cpu_rounding=True, **dict(overrides)).standard(tokens)


@functools.lru_cache(maxsize=4096)
def _twin(
    path: Path,
    tokens: tuple[int, ...],
    rotation: tuple[Any, ...] | None,
    cache: str,
    window: int | None,
    n_sink: int,
    overrides: tuple[tuple[str, Any], ...],
) -> np.ndarray:
    table = None if rotation is None else lambda n_rot: rho(n_rot, *rotation)
    ref = reference(path, cpu_rounding=True, **dict(overrides))
    return ref.twin(tokens, len(tokens) - 1, rho=table, cache=cache, window=window, n_sink=n_sink)


def expected(
    path: Path, tokens: list[int], i: int, c: pypcd.PCDConfig, **overrides: Any
) -> tuple[np.ndarray, np.ndarray]:
    """L and L* at position i, from the float64 reference."""
    rotation = (c.alpha, c.base_ratio, c.transition) if c.perturbation == "over-rotation" else None
    # without rotation the cached keys are used as they are, whatever `cache` says
    cache = "shared" if rotation is None and c.cache == "rerotated" else c.cache
    more = tuple(sorted(overrides.items()))
    over = _twin(path, tuple(tokens[: i + 1]), rotation, cache, c.window, c.n_sink, more)
    return _standard(path, tuple(tokens), more)[i], over


def close(a: Any, b: Any, atol: float) -> None:
    worst = float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
    assert worst < atol, f"largest difference {worst:.1e}, allowed {atol:.1e}"


def native_row(llm: pypcd.Llama, i: int = -1) -> np.ndarray:
    """The logits that any caller of llama_get_logits_ith sees."""
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, i)
    return np.ctypeslib.as_array(pointer, shape=(llm.n_vocab(),)).copy()


def greedy(llm: pypcd.Llama, n: int = 20) -> list[int]:
    return list(itertools.islice(llm.generate(TOKENS[:40], temp=0.0), n))


def shape(llm: pypcd.Llama) -> dict[str, bool]:
    """How this context computes, for tolerance and rounding."""
    p = llm.context_params
    return {
        "f16": p.type_k == llama_cpp.GGML_TYPE_F16,
        "flash_attn": all(getattr(p, name) == value for name, value in flash(True).items()),
    }


def turn(path: Path, c: pypcd.PCDConfig, **overrides: Any) -> float:
    """The frequency of the twin's fastest pair over that of the model's own fastest pair, at least 1.

    The errors of float32 angles grow with the angles."""
    ref = reference(path, **overrides)
    if c.perturbation != "over-rotation" or not ref.n_rot:
        return 1.0
    table = rho(ref.n_rot, c.alpha, c.base_ratio, c.transition)
    return max([1.0, *(float((table * theta).max() / theta.max()) for theta, _ in ref._rope if theta.any())])


def check_rows(
    llm: pypcd.Llama,
    path: Path,
    tokens: list[int],
    row: int = -1,
    at: int | None = None,
    moved: float = 0.05,
    **overrides: Any,
) -> None:
    """Row `row` of the last decode equals the reference's at position `at`: L, L*, the contrast and what callers see."""
    c = llm.pcd
    assert c is not None
    at = len(tokens) - 1 if at is None else at
    got, atol = llm.pcd_logits(row), tolerance(path, at + 1, **shape(llm), **overrides)
    standard, over = expected(path, tokens, at, c, **overrides)
    close(got.standard, standard, atol)
    assert got.local is not None
    close(got.local, over, atol * turn(path, c, **overrides))
    if at > 2 and c.beta:
        assert np.abs(standard - over).max() > moved, "the twin must differ, or this test shows nothing"
    check_contrast(got, c, native_row(llm, row))


def follow(llm: pypcd.Llama, path: Path, tokens: list[int], *ends: int, **how: Any) -> None:
    """Evaluate a text up to each of these ends; the row there is the reference's."""
    for end in ends:
        llm.eval(tokens[llm.n_tokens : end])
        check_rows(llm, path, tokens[:end], **how)


def check_contrast(got: pypcd.PCDLogits, c: pypcd.PCDConfig, seen: np.ndarray) -> None:
    """The contrast of these rows is Eq. 6, and callers see it; the excluded tokens keep L's order, behind the best."""
    assert got.local is not None
    rows = got.standard.astype(float), got.local.astype(float)
    eq6 = contrast(*rows, c.beta, c.gamma, c.relative_top)
    kept = np.isfinite(eq6)
    if kept.sum() == 1:  # a single plausible token keeps its logit
        eq6[kept] = got.standard[kept]
    assert (np.isfinite(got.contrasted) == kept).all()
    # arithmetic alone, on the same rows: some float32 epsilons of numbers below 200
    np.testing.assert_allclose(got.contrasted[kept], eq6[kept], rtol=1e-5, atol=1e-4)
    assert np.array_equal(seen[kept], got.contrasted[kept])
    if not kept.all():
        assert seen[~kept].max() < seen[kept].max() - 59.9
        np.testing.assert_allclose(seen, behind(eq6, got.standard.astype(float)), rtol=1e-5, atol=1e-4)


def find_sdist() -> Path:
    """llama-cpp-python's source distribution, from PYPCD_LLAMA_CPP_SOURCE, build/ or .cache/; the test is skipped where
    none is."""
    root = Path(__file__).parent.parent
    places = [Path(os.environ.get("PYPCD_LLAMA_CPP_SOURCE", "")), *root.glob("build/*/sdist/*.tar.gz")]
    found = next(
        (place for place in [*places, *root.glob(".cache/llama_cpp_python-*.tar.gz")] if place.is_file()), None
    )
    if found is None:
        pytest.skip("no sdist of llama-cpp-python in PYPCD_LLAMA_CPP_SOURCE, build/ or .cache/")
    return found


def module_at(path: Path) -> Any:
    """A Python file that is in no package, imported."""
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_the_tests", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def run_python(code: str, *args: Any, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, where nothing is imported yet."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=env,
        text=True,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
