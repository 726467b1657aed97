"""Writes pypcd/llama.pyi, which tells type checkers and editors what pypcd.Llama takes and returns.

    python cmake/stub.py SITE-PACKAGES > llama.pyi     # that llama-cpp-python is installed in

Its methods pass `*args` and `**kwargs` on to llama_cpp.Llama's, and a type checker does not run pypcd/signatures.py, which shows
those parameters at run time. So the same is done here with source text: both files are parsed, none of llama_cpp is imported.
A method that streams where asked to gets overloads, by its argument `stream`.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pypcd.signatures import PASSES_ON, merged, merged_doc, passes_on

_TYPING = {name: f"from typing import {name}" for name in ("Any", "Literal", "overload")}


@dataclass(frozen=True)
class Source:
    """An expression where a Signature has a value; printed as it is written."""

    text: str

    def __repr__(self) -> str:
        return self.text


class Module:
    """A file, parsed.

    Attributes:
        defined: what is defined at its top level, by name.
        names: for each name there the statement that imports it.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.defined = dict(_definitions(self.tree))
        self.names: dict[str, str] = {}
        package = name.rpartition(".")[0]
        for node in _statements(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    said = alias.asname or alias.name.partition(".")[0]
                    self.names[said] = ast.unparse(ast.Import([alias]))
            elif isinstance(node, ast.ImportFrom):
                source = ".".join(filter(None, [package if node.level else "", node.module]))
                if node.names[0].name == "*":
                    other = Module(path.parent / f"{node.module}.py", source)
                    self.names.update({said: f"from {source} import {said}" for said in other.defined})
                else:
                    self.names.update(
                        {a.asname or a.name: ast.unparse(ast.ImportFrom(source, [a], 0)) for a in node.names}
                    )
        self.names.update({said: f"from {name} import {said}" for said in self.defined})

    def class_named(self, name: str) -> ast.ClassDef:
        found = self.defined[name]
        assert isinstance(found, ast.ClassDef)
        return found

    @property
    def exported(self) -> list[str]:
        """Its __all__."""
        found = self.defined["__all__"]
        assert isinstance(found, ast.Assign)
        return list(ast.literal_eval(found.value))

    def public_functions(self) -> Iterator[tuple[str, ast.FunctionDef]]:
        for name in self.exported:
            node = self.defined[name]
            if isinstance(node, ast.FunctionDef):
                yield name, node


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.Assign):
            yield from ((target.id, node) for target in node.targets if isinstance(target, ast.Name))


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those at the top level, those for type checkers included."""
    for node in tree.body:
        yield from node.body if isinstance(node, ast.If) else [node]


# -- signatures --------------------------------------------------------------------------------------------------------


def signature_of(function: ast.FunctionDef) -> Signature:
    args = function.args
    positional = [(Parameter.POSITIONAL_ONLY, arg) for arg in args.posonlyargs]
    positional += [(Parameter.POSITIONAL_OR_KEYWORD, arg) for arg in args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    every = [(kind, arg, default) for (kind, arg), default in zip(positional, defaults)]
    every += [(Parameter.VAR_POSITIONAL, args.vararg, None)] if args.vararg else []
    every += [(Parameter.KEYWORD_ONLY, arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults)]
    every += [(Parameter.VAR_KEYWORD, args.kwarg, None)] if args.kwarg else []
    return Signature(
        [
            Parameter(arg.arg, kind, default=_source(default), annotation=_source(_Filled.of(arg.annotation)))
            for kind, arg, default in every
        ],
        return_annotation=_source(_Filled.of(function.returns)),
    )


class _Filled(ast.NodeTransformer):
    """Writes List[Any] for List, which pyright's strict mode calls partially unknown wherever it is used."""

    @classmethod
    def of(cls, annotation: ast.expr | None) -> ast.expr | None:
        return cls().visit(annotation) if annotation else None

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        node.slice = self.visit(node.slice)
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Subscript(node, ast.Name("Any")) if node.id == "List" else node


def _source(node: ast.expr | None) -> object:
    return Signature.empty if node is None else Source(ast.unparse(node))


def streaming(signature: Signature) -> list[Signature]:
    """The overloads of a method that returns something, or with stream=True an iterator; else the signature alone.

    The last one is for a bool that is not known before the program runs, or given by position.
    """
    returned = signature.return_annotation
    kinds = _alternatives(ast.parse(str(returned), mode="eval").body) if isinstance(returned, Source) else []
    streamed = [kind for kind in kinds if kind.startswith("Iterator[")]
    if "stream" not in signature.parameters or len(streamed) != 1 or len(kinds) != 2:
        return [signature]
    (whole,) = (kind for kind in kinds if kind not in streamed)
    plain, keyword, is_behind = [], [], False
    for p in signature.parameters.values():
        is_behind = is_behind or p.name == "stream"
        plain.append(p.replace(annotation=Source("Literal[False]")) if p.name == "stream" else p)
        if p.name == "stream":
            p = p.replace(annotation=Source("Literal[True]"), default=Parameter.empty)
        keyword.append(p.replace(kind=Parameter.KEYWORD_ONLY) if is_behind else p)
    return [
        signature.replace(parameters=plain, return_annotation=Source(whole)),
        signature.replace(parameters=keyword, return_annotation=Source(streamed[0])),
        signature,
    ]


def _alternatives(node: ast.expr) -> list[str]:
    """The types that Union[A, B] or A | B names."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _alternatives(node.left) + _alternatives(node.right)
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Union" and isinstance(node.slice, ast.Tuple):
        return [ast.unparse(item) for item in node.slice.elts]
    return [ast.unparse(node)]


_TEXT = """\
# Made by cmake/stub.py of pypcd from pypcd/llama.py and llama_cpp/llama.py.
# from_pretrained takes the keywords that Llama takes, where llama_cpp's takes any; openai may not be installed.
# mypy: disable-error-code="override, import-not-found"
{}

__all__ = {}

{}
"""

# -- the stub ----------------------------------------------------------------------------------------------------------


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name.endswith("__")


def _doc(node: ast.FunctionDef | ast.ClassDef) -> str:
    return ast.get_docstring(node) or ""


def methods(ours: ast.ClassDef, theirs: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """What the stub says of each public method of ours."""
    above = {node.name: node for node in theirs.body if isinstance(node, ast.FunctionDef)}
    shown: dict[str, tuple[Signature, str]] = {}
    nodes = [node for node in ours.body if isinstance(node, ast.FunctionDef) and _is_public(node.name)]
    docs = [_doc(node) for node in nodes if node.name in above and passes_on(signature_of(node))]
    for node in sorted(nodes, key=lambda node: node.name in PASSES_ON):  # those come after what they pass on to
        name, signature, doc = node.name, signature_of(node), _doc(node)
        if name in above and passes_on(signature):
            target, more = shown.get(PASSES_ON.get(name, ""), (None, ""))
            signature = merged(signature, signature_of(above[name]), target)
            own = doc or (_doc(ours) if name == "__init__" else "")
            doc = merged_doc(own, [_doc(above[name]), more], signature.parameters, docs)
            shown[name] = signature, doc
        overloads = streaming(signature)
        for overload in overloads:
            made = function(name, overload, doc)
            made.decorator_list = [ast.Name("overload")] * (len(overloads) > 1) + node.decorator_list
            yield made


def function(name: str, signature: Signature, doc: str) -> ast.FunctionDef:
    made = ast.parse(f"def {name}{signature}: ...").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.body[:0] = [ast.Expr(ast.Constant(doc))] if doc else []
    return made


def stub(ours: Module, theirs: Module) -> str:
    cls = ours.class_named("Llama")
    body = list(methods(cls, theirs.class_named("Llama")))
    doc = ast.Expr(ast.Constant(inspect.cleandoc(_doc(cls))))
    made = ast.ClassDef(cls.name, bases=cls.bases, keywords=[], body=[doc, *body], decorator_list=[], type_params=[])
    said = [made, *(function(name, signature_of(node), _doc(node)) for name, node in ours.public_functions())]
    own = {name: node for name, node in ours.defined.items() if isinstance(node, ast.Assign)}  # such as a TypeVar
    used = set().union(*map(_names, said))
    assigned = [own[name] for name in sorted(used & set(own))]
    used = used.union(*map(_names, assigned)) - set(own)
    used -= {*dir(builtins), *(node.name for node in body)}  # the latter in front of .setter
    # where both have a name, ours counts: theirs is its module llama_cpp.llama_cpp, all of which llama_cpp has too
    known = {**_TYPING, **theirs.names, **ours.names}
    imports = sorted({known[name] for name in used}, key=lambda line: (line.startswith("from"), line))
    head = [*imports, "", *map(ast.unparse, assigned)]
    text = "\n\n".join(ast.unparse(ast.fix_missing_locations(node)) for node in said)
    return _TEXT.format("\n".join(head).strip(), ours.exported, text)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def main() -> None:
    theirs = Module(Path(sys.argv[1]) / "llama_cpp/llama.py", "llama_cpp.llama")
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    print(stub(Module(ROOT / "pypcd/llama.py", "pypcd.llama"), theirs), end="")


if __name__ == "__main__":
    main()
