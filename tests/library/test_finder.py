"""import pypcd first: it imports nothing heavy, and a llama_cpp imported later has pypcd's library. One process per case."""

from __future__ import annotations

import re
from pathlib import Path

import llama_cpp
import pytest
from conftest import run_python

from pypcd.integrations import finder

STOCK = str(Path(llama_cpp.__file__).parent / "lib")
IS_OURS = "assert hasattr(sys.modules['llama_cpp'].llama_cpp._lib, 'llama_pcd_version'), 'the stock library';"


def passes(code: str, **environment: str) -> str:
    done = run_python(f"import sys\n{code}", **environment)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


def test_import_pypcd_imports_nothing_else() -> None:
    seen = passes("before = set(sys.modules); import pypcd; print(*sorted(set(sys.modules) - before))").split()
    assert [name for name in seen if "pypcd" in name] == ["pypcd", "pypcd.integrations", "pypcd.integrations.finder"]
    assert not {"llama_cpp", "numpy", "ctypes", "importlib.metadata", "jinja2", "gguf", "tqdm"} & set(seen)
    # neither do settings, errors and the method
    code = "import pypcd; pypcd.PCDConfig(); pypcd.LibraryError; pypcd.PCDError; print('llama_cpp' in sys.modules)"
    assert passes(code, LLAMA_CPP_LIB_PATH="/nowhere") == "False\n"


@pytest.mark.parametrize(
    "code",
    [
        "import pypcd; from llama_cpp.llama_chat_format import format_llama2",
        "from pypcd import Llama",
        "import pypcd.engine",
        "import importlib, pypcd; importlib.reload(pypcd); import llama_cpp; importlib.reload(llama_cpp)",
        "import pypcd, llama_cpp\n[sys.modules.pop(n) for n in [*sys.modules] if n.startswith('llama_cpp')]\nimport llama_cpp",
    ],
)
def test_llama_cpp_afterwards_has_pypcds_library(code: str) -> None:
    passes(f"{code}\nimport os; {IS_OURS} assert 'LLAMA_CPP_LIB_PATH' not in os.environ")


def test_looking_for_it_loads_nothing_and_what_was_imported_is_a_module_like_any_other() -> None:
    passes(f"""if True:
        import importlib.machinery, importlib.util, inspect, pypcd
        spec = importlib.util.find_spec("llama_cpp")
        assert spec.origin == {llama_cpp.__file__!r} == spec.loader.get_filename("llama_cpp"), spec
        assert spec.loader.is_package("llama_cpp") and "llama_cpp" not in sys.modules
        assert "pypcd.library" not in sys.modules
        import llama_cpp
        {IS_OURS}
        assert type(llama_cpp.__loader__) is importlib.machinery.SourceFileLoader
        assert llama_cpp.__spec__.loader is llama_cpp.__loader__
        assert importlib.util.find_spec("llama_cpp") is llama_cpp.__spec__
        assert "__version__" in inspect.getsource(llama_cpp)""")
    assert finder._finder.find_spec("json") is None is finder._finder.find_spec("llama_cpp.llama")


def test_without_llama_cpp_it_finds_nothing_and_pypcd_says_so() -> None:
    code = "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; import {}"
    done = run_python(code.format("pypcd, importlib.util; print(importlib.util.find_spec('llama_cpp'))"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
    done = run_python(code.format("pypcd; pypcd.Llama"))
    assert "LibraryError: llama-cpp-python is not installed" in done.stderr.splitlines()[-1]
    done = run_python("import sys; sys.modules['typing_extensions'] = None; import pypcd; pypcd.Llama")
    assert re.match("ModuleNotFoundError.*typing_extensions", done.stderr.splitlines()[-1]), "what llama_cpp lacks"


@pytest.mark.parametrize(("path", "message"), [("/nowhere", "unset it"), (STOCK, "has no PCD hooks")])
def test_an_import_that_failed_leaves_no_trace_and_may_be_tried_again(path: str, message: str) -> None:
    passes(
        f"""if True:
        import os, pypcd
        for statement in ("import llama_cpp", "pypcd.Llama", "import llama_cpp", "from pypcd import pcd_sampler"):
            try:
                exec(statement)
            except ImportError as error:
                assert isinstance(error, pypcd.LibraryError) and {message!r} in str(error), error
            else:
                raise AssertionError(statement + " went well")
            assert "llama_cpp" not in sys.modules and os.environ["LLAMA_CPP_LIB_PATH"] == {path!r}
        if {path!r} == "/nowhere":  # a library that was loaded stays
            os.environ["LLAMA_CPP_LIB_PATH"] = ""
            import llama_cpp
            {IS_OURS}""",
        LLAMA_CPP_LIB_PATH=path,
    )


def test_threads_that_import_at_once_all_get_it() -> None:
    """Not with a submodule of llama_cpp among them: then Python itself may report a deadlock, also without pypcd."""
    passes(f"""if True:
        import threading
        sys.setswitchinterval(1e-5)
        statements = ["import llama_cpp", "import pypcd; pypcd.Llama", "from pypcd import engine; engine.rows",
                      "import pypcd; pypcd.pcd_sampler", "import pypcd.decode", "import colorsys, zipapp"]
        import pypcd
        start, failed = threading.Barrier(len(statements)), []
        def run(statement):
            start.wait()
            try:
                exec(statement)
            except BaseException as error:
                failed.append((statement, repr(error)))
        threads = [threading.Thread(target=run, args=(s,), daemon=True) for s in statements]
        for thread in threads: thread.start()
        for thread in threads: thread.join(60)
        assert not failed and not any(thread.is_alive() for thread in threads), failed
        {IS_OURS}""")
