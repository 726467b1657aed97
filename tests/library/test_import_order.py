"""llama_cpp imported before pypcd: its functions are pointed at pypcd's library, unless a model is open. One process per test."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import run_python
from test_library import copy, linux, replace  # noqa: F401  a fixture

from pypcd import library

Tiny = Callable[..., Path]

PACKAGE = Path(llama_cpp.__file__).parent
OURS = Path(llama_cpp.llama_cpp._lib._name).parent


def runs(code: str, *args: Any, **environment: str) -> str:
    done = run_python(code, *args, **environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


# prints a hash of the rows of several settings
ROWS = """
import hashlib, sys
def rows(llm, setting):
    llm.pcd = setting
    llm.reset()
    llm.eval([1, *range(3, 60)])
    found = llm.pcd_logits()
    assert llm.pcd_stats().n_twins
    return [getattr(found, name).tobytes() for name in ("standard", "local", "contrasted")]
llm = pypcd.Llama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1)
for setting in ("paper", "cautious", "window", {"cache": "separate"}, {"evaluation": "alternate"}):
    print(hashlib.sha256(b"".join(rows(llm, setting))).hexdigest())
"""


@pytest.fixture(scope="module")
def wanted(tiny: Tiny) -> str:
    """The rows of a process that imports pypcd first."""
    return runs("import pypcd, llama_cpp" + ROWS, tiny("llama"))


@pytest.mark.parametrize(
    "first",
    [
        "import llama_cpp, pypcd",
        "from llama_cpp import Llama, llama_decode\nimport pypcd",
        "import llama_cpp.llama_chat_format\nimport llama_cpp.llama_cpp_ext\nimport pypcd",
        "import llama_cpp\nfrom pypcd import Llama\nimport pypcd",
        "import llama_cpp\nllama_cpp.llama_backend_init()\nllama_cpp.llama_numa_init(0)\nimport pypcd",
        "import llama_cpp, sys\nllama_cpp.Llama(sys.argv[1], verbose=False).close()\nimport pypcd",
        "import llama_cpp, sys\nx = [llama_cpp.Llama(sys.argv[1], verbose=False)]\nx.append(x)\ndel x\nimport pypcd",
        "import sys\nimport llama_cpp\nimport numpy as np\nimport pypcd",  # sorted by name
    ],
)
def test_the_rows_are_those_of_the_other_order(first: str, wanted: str, tiny: Tiny) -> None:
    assert len(set(wanted.split())) > 3 and runs(first + "\n" + ROWS, tiny("llama")) == wanted


def test_what_was_imported_before_decodes_with_twins_and_samples(tiny: Tiny) -> None:
    """As guidance does it: names of the C API and of the class, and a sampler that the stock library made."""
    said = runs(
        """if True:
        import sys
        import llama_cpp
        import numpy as np
        from llama_cpp import Llama, llama_batch_free, llama_batch_init, llama_decode, llama_get_logits, llama_n_ctx
        from llama_cpp import llama_sampler_chain_add, llama_sampler_free, llama_sampler_sample
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_top_k(5))
        llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_greedy())
        import pypcd
        pypcd.install({"gamma": 5, "beta": 4})
        llm = Llama(sys.argv[1], n_ctx=256, n_threads=1)
        assert type(llm) is pypcd.Llama and isinstance(llm, Llama)
        batch = llama_batch_init(4, 0, 1)
        batch.n_tokens = 4
        for i in range(4):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 5 + i, i, 1, 0, i == 3
        assert llama_decode(llm.ctx, batch) == 0
        row = np.ctypeslib.as_array(llama_get_logits(llm.ctx), (llm.n_vocab(),))
        llama_batch_free(batch)
        contrasted = llm.pcd_logits().contrasted
        kept = np.isfinite(contrasted)
        assert kept.sum() == 5 and np.array_equal(row[kept], contrasted[kept]) and llama_n_ctx(llm.ctx) == 256
        assert llama_sampler_sample(chain, llm.ctx, -1) == contrasted.argmax()
        llama_sampler_free(chain)
        print(llm.pcd_stats().n_twins)""",
        tiny("llama"),
    )
    assert said == "1\n"


@linux
def test_every_function_is_pypcds() -> None:
    assert (
        runs(f"""if True:
        import llama_cpp
        import llama_cpp.llama_cpp_ext as ext
        before = dict(vars(llama_cpp.llama_cpp))
        import ctypes, pypcd
        lib, ranges = llama_cpp.llama_cpp._lib, []
        for line in open("/proc/self/maps"):
            if line.rstrip().endswith({str((OURS / "libllama.so").resolve())!r}):
                ranges.append([int(end, 16) for end in line.split()[0].split("-")])
        functions = [value for value in vars(lib).values() if isinstance(value, lib._FuncPtr)]
        for function in functions + [v for m in (llama_cpp.llama_cpp, ext) for v in vars(m).values() if type(v) is lib._FuncPtr]:
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert any(start <= address < end for start, end in ranges), function.__name__
        assert vars(llama_cpp.llama_cpp).keys() >= before.keys() and llama_cpp.llama_cpp._lib is before["_lib"] is ext._lib
        assert lib._name == {str(OURS / "libllama.so")!r} and lib.llama_pcd_version
        print(len(functions) > 200)""")
        == "True\n"
    )


def test_its_log_is_quiet_and_a_programs_own_stays(tiny: Tiny) -> None:
    load = "llama_cpp.llama_model_load_from_file(b'nowhere.gguf', llama_cpp.llama_model_default_params())"
    said = runs(f"import llama_cpp, pypcd; {load}; from pypcd import engine; print(engine.last_errors())")
    assert "nowhere.gguf" in said
    own = f"""if True:
        import llama_cpp
        seen = []
        callback = llama_cpp.llama_log_callback(lambda level, text, data: seen.append(text))
        llama_cpp.llama_log_set(callback, None)
        import pypcd
        {load}
        print(any(b"nowhere.gguf" in text for text in seen))"""
    assert runs(own) == "True\n"


# --- where it cannot be; what was imported works on ---

REFUSED = """
try:
    import pypcd
except ImportError as error:
    assert type(error).__name__ == "LibraryError" and "pypcd" not in sys.modules
    print(error)
else:
    raise AssertionError("it was imported")
lib = llama_cpp.llama_cpp._lib
assert lib._name.startswith(sys.argv[1]) and not hasattr(lib, "llama_pcd_version"), lib
assert llama_cpp.llama_print_system_info() and llama_cpp.llama_max_devices()
"""
AGAIN = "import pypcd; assert pypcd.Llama(sys.argv[2], pcd=True).pcd"


def refusal(code: str, *args: Any, after: str = "", **environment: str) -> str:
    lib = PACKAGE / "lib"
    return runs(f"import sys, llama_cpp\n{code}\n{REFUSED}\n{after}", lib, *args, **environment)


def test_an_open_model_is_named_and_works_on_and_may_be_closed(tiny: Tiny) -> None:
    said = refusal(
        "llm = llama_cpp.Llama(sys.argv[2], verbose=False)\nllm.eval([1, 2])\nx = llm._ctx.get_logits()[:9]",
        tiny("llama"),
        after=f"llm.reset(); llm.eval([1, 2]); assert llm._ctx.get_logits()[:9] == x\nllm.close()\n{AGAIN}",
    )
    assert re.fullmatch(
        rf"the loaded libllama\S* has no PCD hooks \(.+\) and cannot be replaced now: {re.escape(str(tiny('llama')))} is open; "
        r"import pypcd before llama_cpp, or at least before a model is opened, or set LLAMA_CPP_LIB_PATH=.+\n",
        said,
    )


@linux
def test_a_model_that_the_low_level_api_opened_is_seen_by_its_mapping(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "a blob without a suffix"
    path.write_bytes(tiny("llama").read_bytes())
    said = runs(
        f"""
import sys, llama_cpp
@llama_cpp.llama_log_callback
def quiet(*_): pass
llama_cpp.llama_log_set(quiet, None)
m = llama_cpp.llama_model_load_from_file(sys.argv[2].encode(), llama_cpp.llama_model_default_params())
{REFUSED}
llama_cpp.llama_model_free(m)
{AGAIN}""",
        PACKAGE / "lib",
        path,
    )
    assert f"{path} is open; import pypcd before" in said


def test_a_library_that_cannot_be_replaced_is_kept_with_the_reason() -> None:
    said = refusal("import llama_cpp.mtmd_cpp")
    assert "llama_cpp.mtmd_cpp, which uses it too, has been imported; import pypcd before" in said
    said = refusal("", LLAMA_CPP_LIB_PATH=str(PACKAGE / "lib"))
    assert "has no PCD hooks" in said and "unset LLAMA_CPP_LIB_PATH, which named another library" in said


def test_the_environment_may_name_pypcds_and_the_order_is_nothing(wanted: str, tiny: Tiny) -> None:
    code = "import llama_cpp, sys\nstock = llama_cpp.Llama(sys.argv[1], verbose=False)\nimport pypcd" + ROWS
    assert runs(code, tiny("llama"), LLAMA_CPP_LIB_PATH=str(OURS)) == wanted


@linux
@pytest.mark.parametrize("what", ["version", "ggml"])
def test_what_does_not_fit_is_refused_before_anything_is_changed(what: str, copy: Path) -> None:  # noqa: F811
    if what == "version":
        replace(copy / "__init__.py", llama_cpp.__version__.encode(), b"9.9.99"[: len(llama_cpp.__version__)])
        wanted = "pypcd was built for llama-cpp-python .*, but 9.9"
    else:
        own = re.findall(rb"\0(\d+\.\d+\.\d+)\0", (copy / "lib/libggml-base.so").read_bytes())[0]
        replace(copy / "lib/libggml-base.so", own + b"\0", b"9" + own[1:] + b"\0")
        wanted = "the ggml of the installed llama-cpp-python .* is not the one that pypcd's libllama was built for"
    code = f"import sys\nsys.path.insert(0, sys.argv[2])\nimport llama_cpp\n{REFUSED}\nprint({str(OURS)!r} in open('/proc/self/maps').read())"
    said, loaded = runs(code, copy / "lib", copy.parent).splitlines()
    assert re.match(wanted, said) and loaded == "False"


def test_pictures_elsewhere_than_on_linux_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the loader gives libmtmd the library that was loaded first."""
    library.prepare_mtmd()
    monkeypatch.setattr(library, "_replaced", True)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(library.LibraryError, match="llama_cpp was imported before pypcd; import pypcd first"):
        library.prepare_mtmd()
