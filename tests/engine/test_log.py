"""llama.cpp's log: what a thread's calls failed over is its own, and Ctrl-C that falls into a callback ends the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest
from conftest import Tiny, run_python

from pypcd import engine

# -- errors ----------------------------------------------------------------------------------------------------------


def fail(name: str) -> None:
    """llama.cpp itself logs why."""
    assert not llama_cpp.llama_model_load_from_file(name.encode(), llama_cpp.llama_model_default_params())


def in_a_thread(function: Callable[..., Any], *args: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0]


def test_errors_are_those_of_the_threads_own_calls() -> None:
    def beside() -> str:
        before = engine.last_errors()
        fail("/theirs.gguf")
        return before + "|" + engine.last_errors()

    engine.clear_errors()
    fail("/ours.gguf")
    before, _, theirs = in_a_thread(beside).partition("|")
    assert before == "" and "/theirs.gguf" in theirs and "/ours.gguf" not in theirs
    in_a_thread(engine.clear_errors)
    assert "/ours.gguf" in engine.last_errors() and "/theirs.gguf" not in engine.last_errors()


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------

START = """if True:
    import _thread, functools, logging, operator, signal, sys
    import llama_cpp, pypcd
    from pypcd import engine
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run in the background
    def open_it(**options):
        return pypcd.Llama(sys.argv[1], n_ctx=64, n_threads=1, **options)
    def caught(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            return "caught"
        return "nothing"
    class Pressing(logging.Handler):
        def emit(self, record):
            if self in log.handlers:
                log.removeHandler(self)
                signal.raise_signal(signal.SIGINT)
    log = logging.getLogger("pypcd")
    log.setLevel(logging.DEBUG)
"""
AFTER = """
    log.setLevel(logging.WARNING)
    llm = open_it()
    print(llm.n_tokens, len(llm("ba", max_tokens=3, temperature=0)["choices"][0]["text"]) > 0)
"""
CASES = {
    "opening a model": """
    log.addHandler(Pressing())
    print(caught(open_it))""",
    "stock llama_cpp's own model": """
    log.addHandler(Pressing())
    print(caught(llama_cpp.Llama, sys.argv[1], n_ctx=64, verbose=False))""",
    "before the first line of the callback": """
    press_and_log = [_thread.interrupt_main, functools.partial(engine._log._callback, 3, b"a line", None)]
    def both():
        list(map(operator.methodcaller("__call__"), press_and_log))  # nothing of Python's between the two
        llama_cpp.llama_max_devices()
    print(caught(both))""",
    "a callback that asks whether to go on": """
    llm = open_it()
    engine.set_abort(llm, lambda: signal.raise_signal(signal.SIGINT))
    print(caught(llm.eval, [3, 4, 5]))""",
}


@pytest.mark.parametrize("case", CASES)
def test_ctrl_c_in_a_callback_reaches_the_caller_and_the_library_goes_on(case: str, tiny: Tiny) -> None:
    done = run_python(START + CASES[case] + AFTER, tiny("llama"))
    assert (done.returncode, done.stdout) == (0, "caught\n0 True\n"), done.stderr
    assert "Exception ignored" not in done.stderr


def test_what_is_raised_in_other_callbacks_goes_where_it_went() -> None:
    """Nor does an interrupt of one thread end another one's call."""
    code = """if True:
        import ctypes, signal, sys, threading
        sys.unraisablehook = lambda unraisable: print("theirs:", unraisable.exc_type.__name__)
        import llama_cpp, pypcd
        from pypcd import engine
        def fail():
            raise SystemExit
        ctypes.CFUNCTYPE(None)(fail)()
        threading.Thread(target=lambda: setattr(engine._log._here, "interrupt", KeyboardInterrupt())).start()
        llama_cpp.llama_max_devices()
        print("done")"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "theirs: SystemExit\ndone\n"), done.stderr
