"""What Python itself shows of a function that passes `*args` and `**kwargs` on: its parameters and its docstring at run time.

An extension of griffe, which reads the sources for mkdocstrings and runs nothing of them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import griffe

__all__ = ["AsShown"]


class AsShown(griffe.Extension):
    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        thing = at_run_time(func)
        if thing is None or not passes_on(func):
            return
        signature = inspect.signature(thing)
        func.parameters = griffe.Parameters(*map(shown, signature.parameters.values()))
        if signature.return_annotation is not signature.empty:
            func.returns = annotation(signature.return_annotation)
        set_docstring(func, thing)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        init = cls.members.get("__init__")
        if isinstance(init, griffe.Function):
            set_docstring(cls, at_run_time(init))  # the page has the constructor's text with the class …
            if cls.docstring:
                cls.docstring.value = re.sub(
                    r"\n\nReturns:\n(    .*\n?)+", "\n", cls.docstring.value
                )  # … which returns nothing


def passes_on(func: griffe.Function) -> bool:
    kinds = {parameter.kind for parameter in func.parameters}
    return bool(kinds & {griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword})


def at_run_time(thing: griffe.Object) -> Any:
    """None for what is defined in a function, is not there at run time, or needs an extra that is not installed."""
    try:
        module = importlib.import_module(thing.module.path)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pypcd"):
            raise
        return None
    names = thing.path.removeprefix(f"{module.__name__}.").split(".")
    return functools.reduce(lambda of, name: getattr(of, name, None), names, module)


def set_docstring(thing: griffe.Object, at_run_time: object) -> None:
    if thing.docstring and at_run_time.__doc__:
        thing.docstring.value = inspect.cleandoc(at_run_time.__doc__)


def shown(parameter: inspect.Parameter) -> griffe.Parameter:
    return griffe.Parameter(
        parameter.name,
        kind=griffe.ParameterKind[parameter.kind.name.lower()],
        annotation=None if parameter.annotation is parameter.empty else annotation(parameter.annotation),
        default=None if parameter.default is parameter.empty else repr(parameter.default),
    )


def annotation(value: object) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)
