"""What a subclass's methods take, for inspect, help() and editors, where they pass `*args` and `**kwargs` on to the class above.

    @shows_arguments_of(llama_cpp.Llama)
    class Llama(llama_cpp.Llama): ...

The parameters and their documentation are read from the class above, so there is no copy of them to keep up to date. A parameter
that the subclass names itself is shown as it has it. cmake/stub.py does the same with source text, for type checkers, so only the
standard library is used. Knows nothing of PCD.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any, Callable, TypeVar

__all__ = ["PASSES_ON", "merged", "merged_doc", "shows_arguments_of"]

_Class = TypeVar("_Class", bound=type)

# methods of the class above that hand *args or **kwargs to another method of the object, which may be the subclass's
PASSES_ON = {"create_chat_completion_openai_v1": "create_chat_completion", "from_pretrained": "__init__"}

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def merged(ours: Signature, theirs: Signature, target: Signature | None = None) -> Signature:
    """The signature of a method that passes what it does not name on to the same method of the class above.

    Args:
        ours: as it is written.
        theirs: of the method above.
        target: of the method that `theirs` passes its own *args or **kwargs on to.
    """
    taken = {name: p for name, p in theirs.parameters.items() if p.kind not in _VARIADIC}
    if target is not None:
        by_position = any(p.kind is Parameter.VAR_POSITIONAL for p in theirs.parameters.values())
        for name, parameter in target.parameters.items():
            if by_position or parameter.kind is Parameter.KEYWORD_ONLY:  # the others it gives itself
                taken.setdefault(name, parameter)
    named = {name: p for name, p in ours.parameters.items() if p.kind not in _VARIADIC}
    more = [p for name, p in named.items() if name not in taken]
    shown = [named[name].replace(kind=p.kind) if name in named else p for name, p in taken.items()]
    returned = ours.return_annotation
    if str(returned) == "Any" and theirs.return_annotation is not Signature.empty:
        returned = theirs.return_annotation
    return Signature(sorted([*more, *shown], key=lambda p: p.kind), return_annotation=returned)


def passes_on(signature: Signature) -> bool:
    """Whether a method has *args or **kwargs."""
    return any(p.kind in _VARIADIC for p in signature.parameters.values())


# -- documentation -----------------------------------------------------------------------------------------------------

_SECTION = re.compile(r"^(Args|Raises|Returns|Yields|Examples):$", re.MULTILINE)


def merged_doc(ours: str, others: Iterable[str], names: Iterable[str], beside: Iterable[str] = ()) -> str:
    """Our text, with the entries of the others' docstrings for the arguments and exceptions that it leaves out, and what they return.

    Args:
        ours: a docstring with sections as Google writes them.
        others: docstrings; the first that has an entry counts.
        names: the arguments that there are, in their order.
        beside: docstrings of our other methods: an argument that several have is told of in one.
    """
    docs = [_sections(ours), *map(_sections, others)]
    args = _first(_entries(doc.get("Args", "")) for doc in [*docs, *map(_sections, beside)])
    parts = [docs[0][""], _section("Args", [args[name] for name in names if name in args])]
    for title in ("Returns", "Yields"):
        parts.append(_section(title, [next((doc[title] for doc in docs if title in doc), "")]))
    parts.append(_section("Raises", _first(_entries(doc.get("Raises", "")) for doc in docs).values()))
    return "\n\n".join(filter(None, parts))


def _sections(doc: str) -> dict[str, str]:
    """The text of each section by its title; what comes before has none."""
    text, *rest = _SECTION.split(inspect.cleandoc(doc))
    return {"": text.strip(), **{title: body.strip("\n").rstrip() for title, body in zip(rest[::2], rest[1::2])}}


def _entries(body: str) -> dict[str, str]:
    """The entries of a section by their names, such as "    beta: how strong"; indented lines belong to the one before."""
    texts = re.split(r"\n(?=    \S)", body)
    return {m[1]: text.rstrip() for text in texts if (m := re.match(r"    (\**\w+)\b[^:]*:", text))}


def _first(found: Iterable[Mapping[str, str]]) -> dict[str, str]:
    result: dict[str, str] = {}
    for entries in found:
        for name, text in entries.items():
            result.setdefault(name, text)
    return result


def _section(title: str, texts: Iterable[str]) -> str:
    body = "\n".join(filter(None, texts))
    return f"{title}:\n{body}" if body else ""


# -- the decorator -----------------------------------------------------------------------------------------------------


def shows_arguments_of(above: type) -> Callable[[_Class], _Class]:
    """A class decorator: each of its methods that has *args or **kwargs shows the parameters of the method `above`."""

    def decorate(cls: _Class) -> _Class:
        methods = {name: getattr(value, "__func__", value) for name, value in vars(cls).items()}
        methods = {
            name: function
            for name, function in methods.items()
            if inspect.isfunction(function) and hasattr(above, name) and passes_on(inspect.signature(function))
            if inspect.unwrap(function) is not inspect.unwrap(getattr(above, name))  # that one, in another decorator
        }
        docs = [function.__doc__ for function in methods.values() if function.__doc__]
        for name in sorted(methods, key=lambda name: name in PASSES_ON):  # those come after what they pass on to
            _show(methods, name, above, cls, docs)
        return cls

    return decorate


def _show(methods: Mapping[str, Any], name: str, above: type, cls: type, docs: Iterable[str]) -> None:
    function, other = methods[name], getattr(getattr(above, name), "__func__", getattr(above, name))
    target = methods.get(PASSES_ON.get(name, ""))
    function.__signature__ = merged(
        inspect.signature(function), inspect.signature(other), target and inspect.signature(target)
    )
    # texts among them are evaluated in the module of their function, so those of the other module are evaluated here
    hints = {**(getattr(target, "__annotations__", {})), **typing.get_type_hints(other), **function.__annotations__}
    shown = function.__signature__.parameters
    function.__annotations__ = {name: hint for name, hint in hints.items() if name in shown or name == "return"}
    ours = function.__doc__ or (cls.__doc__ if name == "__init__" else None)
    if ours and other.__doc__:  # python -OO has no docstrings
        others = [other.__doc__, *([target.__doc__] if target is not None and target.__doc__ else [])]
        function.__doc__ = merged_doc(ours, others, shown, docs)
