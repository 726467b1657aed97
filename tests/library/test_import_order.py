"""llama_cpp imported before pypcd: a sentence that names what to do, and what was imported works on. One process per test."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from conftest import run_python
from test_library import copy, linux, replace  # noqa: F401  a fixture

Tiny = Callable[..., Path]

PACKAGE = Path(llama_cpp.__file__).parent
OURS = Path(llama_cpp.llama_cpp._lib._name).parent


def runs(code: str, *args: Any, **environment: str) -> str:
    done = run_python(code, *args, **environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


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
    said = runs(
        f"import sys, llama_cpp, llama_cpp.mtmd_cpp\nllm = llama_cpp.Llama(sys.argv[2], verbose=False); llm.eval([1, 2])\n"
        f"x = llm._ctx.get_logits()[:9]\n{REFUSED}\nllm.reset(); llm.eval([1, 2]); assert llm._ctx.get_logits()[:9] == x; llm.close()",
        PACKAGE / "lib",
        tiny("llama"),
    )
    assert re.fullmatch(
        r"llama_cpp was imported before pypcd, so it has a libllama without PCD hooks \(.+\), which cannot be replaced now; "
        rf"import pypcd before llama_cpp, or set LLAMA_CPP_LIB_PATH={re.escape(str(OURS))}; or PYPCD_ENGINE=stock, for settings with .+\n",
        said,
    )


@pytest.mark.skipif(OURS.parents[1] != PACKAGE.parent, reason="llama_cpp alone does not find ggml")
def test_the_library_that_the_sentence_names_helps(tiny: Tiny) -> None:
    """And so does the stock engine: test_engines.py."""
    code = "import sys, llama_cpp, pypcd\nprint(pypcd.Llama(sys.argv[1], pcd='window', n_ctx=256, n_threads=1).engine)"
    assert runs(code, tiny("llama"), LLAMA_CPP_LIB_PATH=str(OURS)) == "native\n"


def test_its_log_is_quiet_and_a_programs_own_stays() -> None:
    load = "llama_cpp.llama_model_load_from_file(b'nowhere.gguf', llama_cpp.llama_model_default_params())"
    said = runs(f"import pypcd, llama_cpp; {load}; from pypcd import engine; print(engine.last_errors())")
    assert "nowhere.gguf" in said
    own = f"""if True:
        import llama_cpp
        seen = []
        callback = llama_cpp.llama_log_callback(lambda level, text, data: seen.append(text))
        llama_cpp.llama_log_set(callback, None)
        import pypcd
        {load}
        print(any(b"nowhere.gguf" in text for text in seen))"""
    assert runs(own, PYPCD_ENGINE="stock") == "True\n"


@linux
@pytest.mark.parametrize("what", ["version", "ggml"])
def test_one_that_pypcds_does_not_fit_is_told_why(what: str, copy: Path) -> None:  # noqa: F811
    if what == "version":
        replace(copy / "__init__.py", llama_cpp.__version__.encode(), b"9.9.99"[: len(llama_cpp.__version__)])
        wanted = "pypcd was built for llama-cpp-python .*, but 9.9"
    else:
        own = re.findall(rb"\0(\d+\.\d+\.\d+)\0", (copy / "lib/libggml-base.so").read_bytes())[0]
        replace(copy / "lib/libggml-base.so", own + b"\0", b"9" + own[1:] + b"\0")
        wanted = "the ggml of the installed llama-cpp-python .* is not the one that pypcd's libllama was built for"
    code = f"import sys\nsys.path.insert(0, sys.argv[2])\nimport llama_cpp\n{REFUSED}\nprint({str(OURS)!r} in open('/proc/self/maps').read())"
    said, loaded = runs(code, copy / "lib", copy.parent, PYPCD_ENGINE="native").splitlines()
    assert re.match(wanted, said) and loaded == "False"
