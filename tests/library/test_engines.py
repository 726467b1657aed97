"""Which engine a process has: pypcd's own libllama if it is installed and fits, else the stock one, and the reason said; and if
llama_cpp was imported before pypcd, a sentence that names what to do, and what was imported works on. One process per test."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import Tiny, run_python
from test_library import PACKAGE, copy, linux, replace  # noqa: F401  a fixture

import pypcd

STOCK = str(PACKAGE / "lib")
OPEN = """
def said(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
def opened(**more):
    return pypcd.Llama(sys.argv[1], n_ctx=256, n_threads=1, **more)
llm = opened(pcd="window:window=8")
llm.eval(list(range(5, 45)))
print(llm.engine, llm.pcd_stats().n_twins, llm.pcd_logits().local is not None)
"""


def runs(code: str, *args: Any, engine: str = "", quiet: bool = True, **environment: str) -> list[str]:
    done = run_python("import sys\n" + code, *args, PYPCD_ENGINE=engine, **environment)
    assert done.returncode == 0 and (not quiet or done.stderr == ""), done.stderr
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("first", "engine", "lib", "name"),
    [
        ("import pypcd", " Stock ", "", "stock"),
        ("import llama_cpp, pypcd", "", STOCK, "stock"),
        ("import llama_cpp, pypcd\nllm = llama_cpp.Llama(sys.argv[1], verbose=False)", "stock", "", "stock"),
    ],
)
def test_the_environment_decides(first: str, engine: str, lib: str, name: str, tiny: Tiny) -> None:
    environment = {"LLAMA_CPP_LIB_PATH": lib} if lib else {}
    assert runs(first + OPEN, tiny("llama"), engine=engine, **environment) == [f"{name} 1 True"]


def test_what_is_installed_decides_and_a_process_with_the_native_library_has_both(tiny: Tiny) -> None:
    more = "print([opened(engine=name, pcd='window').engine for name in (None, 'native', 'stock')])"
    shown = runs("import pypcd" + OPEN + more, tiny("llama"))
    assert shown == ["native 1 True", "['native', 'native', 'stock']"]


def test_a_process_with_the_stock_library_says_what_the_other_is_needed_for(tiny: Tiny) -> None:
    more = """
print(said(lambda: opened(engine="native")))
print(said(lambda: opened(pcd="paper:type_k_over=f16")))
print(said(lambda: pypcd.pcd_sampler(llm)))
"""
    said = runs("import pypcd" + OPEN + more, tiny("llama"), engine="stock")[1:]
    errors = ['LibraryError: engine="native"', *["UnsupportedError: "] * 2]
    assert [line.startswith(start) for line, start in zip(said, errors)] == [True] * 3, said
    assert all(line.endswith("libllama.so: PYPCD_ENGINE is stock; unset it") for line in said), said
    assert all("needs pypcd's own libllama" in line for line in said), said


def test_there_is_no_other_engine() -> None:
    (line,) = runs("import pypcd\ntry: pypcd.Llama\nexcept ValueError as error: print(error)", engine="stok")
    assert (
        line
        == "the environment variable PYPCD_ENGINE is 'stok'; allowed: native, stock; unset, what is installed decides"
    )


@linux
def test_one_that_does_not_fit_is_left_with_a_warning(copy: Path, tiny: Tiny) -> None:  # noqa: F811
    replace(copy / "__init__.py", llama_cpp.__version__.encode(), b"9.9.99"[: len(llama_cpp.__version__)])
    code = "sys.path.insert(0, sys.argv[2])\nimport pypcd" + OPEN
    out, warning = runs(code, tiny("llama"), copy.parent, quiet=False)
    assert out == "stock 1 True"
    assert warning.startswith("pypcd's own libllama is not used, so not all settings can run: pypcd was built for")


def test_without_one_the_stock_one_is_taken_in_silence(tiny: Tiny, tmp_path: Path) -> None:
    """As pypcd is installed from its wheel without a native part."""
    shutil.copytree(
        Path(pypcd.__file__).parent, tmp_path / "pypcd", ignore=shutil.ignore_patterns("lib", "bin", "__pycache__")
    )
    code = (
        "sys.path.insert(0, sys.argv[2])\nfrom pypcd import library\nlibrary.library_dirs = lambda: []\nimport pypcd"
        + OPEN
    )
    assert runs(code, tiny("llama"), tmp_path) == ["stock 1 True"]
    code = code.replace(OPEN, "\ntry: pypcd.Llama\nexcept ImportError as error: print(type(error).__name__, error)")
    (said,) = runs(code, tiny("llama"), tmp_path, engine="native")
    assert said.startswith("LibraryError pypcd's libllama was not found")


@linux
def test_a_stock_library_that_does_not_load_is_one_sentence(copy: Path) -> None:  # noqa: F811
    (copy / "lib/libllama.so").unlink()
    code = "sys.path.insert(0, sys.argv[1])\nimport pypcd\ntry: pypcd.Llama\nexcept ImportError as error: print(type(error).__name__, error)"
    (said,) = runs(code, copy.parent, engine="stock")
    assert said.startswith("LibraryError libllama cannot be loaded: ") and said.endswith("reinstall llama-cpp-python")


# -- llama_cpp before pypcd --------------------------------------------------------------------------------------------

OURS = Path(llama_cpp.llama_cpp._lib._name).parent
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
"""


def test_its_library_is_not_replaced_and_works_on(tiny: Tiny) -> None:
    (said,) = runs(
        f"import llama_cpp, llama_cpp.mtmd_cpp\nllm = llama_cpp.Llama(sys.argv[2], verbose=False); llm.eval([1, 2])\n"
        f"x = llm._ctx.get_logits()[:9]\n{REFUSED}\nllm.reset(); llm.eval([1, 2]); assert llm._ctx.get_logits()[:9] == x; llm.close()",
        PACKAGE / "lib",
        tiny("llama"),
        engine="native",
    )
    assert re.fullmatch(
        r"llama_cpp was imported before pypcd, so it has a libllama without PCD hooks \(.+\), which cannot be replaced now; "
        rf"import pypcd before llama_cpp, or set LLAMA_CPP_LIB_PATH={re.escape(str(OURS))}; or PYPCD_ENGINE=stock, which runs fewer settings",
        said,
    )


def test_its_log_is_quiet_and_a_programs_own_stays() -> None:
    load = "llama_cpp.llama_model_load_from_file(b'nowhere.gguf', llama_cpp.llama_model_default_params())"
    said = runs(f"import pypcd, llama_cpp; {load}; from pypcd import engine; print(engine.last_errors())")
    assert "nowhere.gguf" in "".join(said)
    own = f"""if True:
        import llama_cpp
        seen = []
        callback = llama_cpp.llama_log_callback(lambda level, text, data: seen.append(text))
        llama_cpp.llama_log_set(callback, None)
        import pypcd
        {load}
        print(any(b"nowhere.gguf" in text for text in seen))"""
    assert runs(own, engine="stock") == ["True"]
