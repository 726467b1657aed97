"""What inspect, help() and editors see of pypcd.Llama: llama_cpp's own parameters and ours."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import os
import subprocess
import sys
import typing
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

import pypcd
from pypcd.signatures import merged, merged_doc, shows_arguments_of

ROOT = Path(__file__).resolve().parents[2]
STOCK = Path(llama_cpp.__file__).parent / "llama.py"

# ours, by method; the others that pypcd.Llama has are llama_cpp's
OF_INIT = {"progress", "pcd", "engine", "n_seq_max", "use_extra_bufts", "rpc_servers"}
OURS = {
    "__init__": OF_INIT,
    "__call__": {"pcd"},
    "create_completion": {"pcd"},
    "create_chat_completion": {"pcd"},
    "generate": {"pcd"},
    "sample": set(),
    "embed": set(),
}
# whose default is another here, and what stock's is
OTHER_DEFAULTS = {"n_gpu_layers": 0, "n_ctx": 512, "flash_attn": False, "verbose": True}


def written(name: str) -> dict[str, str | None]:
    """llama_cpp's parameters of a method as its source has them, with their defaults, in order."""
    (cls,) = (
        node
        for node in ast.parse(STOCK.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "Llama"
    )
    (function,) = (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name)
    args = function.args
    defaults: list[ast.expr | None] = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    every = [*zip(args.args, defaults), *zip(args.kwonlyargs, args.kw_defaults)]
    return {arg.arg: default and ast.unparse(default) for arg, default in every}


def named(signature: inspect.Signature) -> dict[str, Parameter]:
    return {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def is_open(signature: inspect.Signature) -> bool:
    return len(named(signature)) < len(signature.parameters)


def test_no_public_method_hides_parameters_behind_args_and_kwargs() -> None:
    hiding = [
        name
        for name, value in inspect.getmembers(pypcd.Llama, callable)
        if (not name.startswith("_") or name in OURS) and is_open(inspect.signature(value))
    ]
    assert not hiding
    assert not is_open(inspect.signature(pypcd.Llama))

    class Mine(pypcd.Llama):
        def __init__(self, path: str) -> None:
            super().__init__(path)

    assert list(inspect.signature(Mine).parameters) == ["path"], "a user's own class shows its own"


@pytest.mark.parametrize("name", OURS)
def test_every_parameter_of_stock_is_there_and_as_it_is(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(cls, name)) for cls in (pypcd.Llama, llama_cpp.Llama))
    assert set(ours.parameters) == set(named(theirs)) | OURS[name]
    assert [p for p in ours.parameters if p not in OURS[name]] == list(written(name))
    for parameter in named(theirs).values():
        shown = ours.parameters[parameter.name]
        assert shown.kind is parameter.kind
        if name == "__init__" and parameter.name in OTHER_DEFAULTS:
            assert parameter.default == OTHER_DEFAULTS[parameter.name] != shown.default
        else:
            assert shown.default == parameter.default
        if name != "__init__":
            assert shown.annotation == parameter.annotation
    assert all(ours.parameters[p].kind is Parameter.KEYWORD_ONLY for p in OURS[name])


def test_what_is_passed_on_is_shown_where_it_is_passed() -> None:
    chat, v1 = (getattr(pypcd.Llama, f"create_chat_completion{end}") for end in ("", "_openai_v1"))
    assert inspect.signature(v1).parameters == inspect.signature(chat).parameters
    found = inspect.signature(pypcd.Llama.from_pretrained).parameters
    own = [name for name in written("from_pretrained") if name != "cls"]
    init = [p for p in inspect.signature(pypcd.Llama).parameters.values() if p.name != "model_path"]
    assert list(found) == own + [p.name for p in init] and list(found.values())[len(own) :] == init


def test_hints_can_be_evaluated() -> None:
    for name in OURS:
        hints, theirs = (typing.get_type_hints(getattr(cls, name)) for cls in (pypcd.Llama, llama_cpp.Llama))
        assert set(hints) - {"return"} == set(inspect.signature(getattr(pypcd.Llama, name)).parameters) - {"self"}
        if name != "__init__":
            assert {p: hints[p] for p in theirs if p != "return"} == {p: v for p, v in theirs.items() if p != "return"}


if sys.version_info < (3, 10):  # our own hints are written for later ones
    del test_hints_can_be_evaluated


def helped(thing: object) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        help(thing)
    return out.getvalue()


def test_help_has_the_documentation_of_every_argument() -> None:
    assert "n_ctx: int | None = None" in helped(pypcd.Llama).replace("'", "")
    for name in ("__init__", "__call__", "create_completion", "create_chat_completion", "generate"):
        doc, theirs = helped(getattr(pypcd.Llama, name)), inspect.getdoc(getattr(llama_cpp.Llama, name)) or ""
        entries = [p for p in inspect.signature(getattr(pypcd.Llama, name)).parameters if f"\n    {p}: " in theirs]
        assert len(entries) >= 6
        assert all(doc.count(f"\n        {p}: ") == 1 for p in {*entries, *OURS[name]}), name


def test_it_works_without_docstrings() -> None:
    code = "import pypcd, inspect; print('n_ctx' in inspect.signature(pypcd.Llama).parameters, pypcd.Llama.generate.__doc__)"
    done = subprocess.run([sys.executable, "-OO", "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout == "True None\n"


# -- by hand -----------------------------------------------------------------------------------------------------------


def signature_of(text: str) -> inspect.Signature:
    names: dict[str, Callable[..., Any]] = {}
    exec(f"from __future__ import annotations\ndef f{text}: ...".replace("'", ""), names)  # noqa: S102
    return inspect.signature(names["f"])


@pytest.mark.parametrize(
    ("ours", "theirs", "target", "shown"),
    [
        ("(self, *args, x=1, **kwargs)", "(self, a, b=2)", None, "(self, a, b=2, *, x=1)"),
        ("(self, a, *, x=1, b=3, **kw)", "(self, a, *, c=0, b=2, **kw)", None, "(self, a, *, x=1, c=0, b=3)"),
        ("(*args, **kwargs) -> 'Any'", "(a) -> 'int'", None, "(a) -> 'int'"),
        ("(*args, **kwargs) -> 'Any'", "(a)", None, "(a) -> 'Any'"),
        ("(*args, **kwargs) -> 'bool'", "(a) -> 'int'", None, "(a) -> 'bool'"),
        ("(self, *args, **kwargs)", "(self, *args, **kwargs)", "(self, a, b=1, *, c)", "(self, a, b=1, *, c)"),
        ("(cls, *args, **kw)", "(cls, a, b=1, **kw)", "(self, path, *, b=0, c=2)", "(cls, a, b=1, *, c=2)"),
    ],
)
def test_merged_by_hand(ours: str, theirs: str, target: str | None, shown: str) -> None:
    assert str(merged(signature_of(ours), signature_of(theirs), target and signature_of(target))) == shown


def test_merged_documentation_by_hand() -> None:
    ours = """Ours.

        More.

        Args:
            b: ours, which
                goes on: here.
            **kwargs: those of theirs.

        Raises:
            OurError: ours.
        """
    theirs = """Theirs.

        Examples:
            >>> a: b

        Args:
            a: theirs.
            b: theirs too.

        Raises:
            ValueError: theirs.

        Returns:
            Something.
        """
    beside = "Another.\n\nArgs:\n    b: no.\n    d: no.\n    c: this.\n\nRaises:\n    TypeError: no."
    assert merged_doc(ours, [theirs], ["a", "b", "c"], [beside]) == (
        "Ours.\n\nMore.\n\nArgs:\n    a: theirs.\n    b: ours, which\n        goes on: here.\n    c: this.\n\n"
        "Returns:\n    Something.\n\nRaises:\n    OurError: ours.\n    ValueError: theirs."
    )


def test_the_decorator_leaves_what_it_need_not_change() -> None:
    class Above:
        def f(self, a: int, b: int = 2) -> int:
            """Above.

            Args:
                a: one.
            """
            return a + b

        def g(self, a: int) -> int:
            return a

    @shows_arguments_of(Above)
    class Below(Above):
        def f(self, *args: Any, x: int = 1, **kwargs: Any) -> Any:
            """Below."""
            return super().f(*args, **kwargs) + x

        def g(self, a: int, more: int = 0) -> int:
            return a + more

        def h(self, *args: Any) -> int:
            return len(args)

    assert str(inspect.signature(Below.f)) == "(self, a: 'int', b: 'int' = 2, *, x: 'int' = 1) -> 'int'"
    assert Below.f.__doc__ == "Below.\n\nArgs:\n    a: one." and Below().f(1, b=3, x=5) == 9
    assert not hasattr(Below.g, "__signature__") and not hasattr(Below.h, "__signature__")


@pytest.mark.parametrize("first", [True, False])
def test_another_decorator_may_wrap_the_methods_before_and_after(first: bool) -> None:
    class Above:
        def f(self, a: int) -> int:
            return a

        def g(self, *args: Any) -> int:
            return len(args)

    def wrapping(cls: Any) -> Any:
        for name in ("f", "g"):  # the second is inherited
            function = getattr(cls, name)
            setattr(cls, name, functools.wraps(function)(lambda *args, _f=function, **kwargs: _f(*args, **kwargs)))
        return cls

    class Below(Above):
        def f(self, *args: Any, x: int = 1, **kwargs: Any) -> Any:
            return super().f(*args, **kwargs) + x

    shows = shows_arguments_of(Above)
    decorated = wrapping(shows(Below)) if first else shows(wrapping(Below))
    assert str(inspect.signature(decorated.f)) == "(self, a: 'int', *, x: 'int' = 1) -> 'int'"
    assert str(inspect.signature(decorated.g)) == "(self, *args: 'Any') -> 'int'"
    assert decorated().f(2, x=3) == 5 and decorated().g(1, 2) == 2


# -- the stub ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stub() -> ast.Module:
    if not (ROOT / "cmake/stub.py").exists():
        pytest.skip("cmake/ lies in a checkout only")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-S", ROOT / "cmake/stub.py", STOCK.parent.parent]  # it needs no package
    done = subprocess.run(command, env=env, text=True, capture_output=True, check=True)
    return ast.parse(done.stdout)


def test_the_stub_has_the_parameters_that_are_there_at_run_time(stub: ast.Module) -> None:
    (cls,) = (node for node in stub.body if isinstance(node, ast.ClassDef))
    found: dict[str, ast.FunctionDef] = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    own = {
        name
        for name, value in vars(pypcd.Llama).items()
        if isinstance(value, property) or getattr(inspect.unwrap(value), "__module__", "") == "pypcd.llama"
    }
    assert set(found) == {name for name in own if not name.startswith("_") or name.endswith("__")}
    assert len(found) > 20
    for name, node in found.items():
        value = inspect.getattr_static(pypcd.Llama, name)
        if isinstance(value, property):
            continue
        function = getattr(value, "__func__", value)
        signature, args = inspect.signature(function), node.args
        assert [a.arg for a in (*args.posonlyargs, *args.args)] == [
            p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
        ], name
        assert [a.arg for a in args.kwonlyargs] == [
            p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY
        ], name
        assert ast.get_docstring(node) == (function.__doc__ and inspect.getdoc(function)), name
