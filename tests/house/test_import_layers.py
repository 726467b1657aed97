"""The package's layers: nothing imports upwards, and only the engine touches libllama."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from pathlib import Path

import pypcd
from pypcd import engine

ROOT = Path(pypcd.__file__).parent
RESEARCH = Path(__file__).parents[2] / "research"
FILES = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

# the layers, lowest first; a module may import from its own layer and those below
LAYERS: tuple[set[str], ...] = (
    {"errors", "files", "settings", "library"},
    {"gguf"},
    {"engine"},
    {"llama"},
    {"prompt", "document", "find"},
    {"decode"},
    {"ask", "server"},
    {"bench", "evaluation"},
    {"integrations"},
    {"cli"},
)
LAYER_OF = {part: i for i, parts in enumerate(LAYERS) for part in parts}
# the entry points: they may import anything, and nothing imports them
FRONT = {"__init__", "__main__", "integrations.finder"}

# what a user calls on an object of a lower layer
DOORS = {("llama", "pypcd.ask"): "Llama.ask"}

# modules outside the engine that may touch the library: it decides which one there is, so that the engine can be imported
TOUCHES = {"library/__init__.py"}
# private attributes of pypcd.Llama that pypcd may use
OURS = {
    "_pcd_set_to": "another setting, or none, for a while and back, with a sampler's share of the work",
    "_apply": "a sampler takes the contrast over",
    "_held": "what the context holds of a prompt, for all sessions",
    "_open": "the session whose answer is not finished",
    "_answer": "what PCD did to a method's answer, for last_answer",
    "_n_changes": "whether somebody else evaluated in the context",
}


LLAMA = ROOT / "llama" / "__init__.py"


def part_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts) if ".".join(parts) in FRONT else parts[0]


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the dotted name of each module or name of pypcd that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("pypcd."))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "pypcd":
                yield from ((node.lineno, f"pypcd.{alias.name}") for alias in node.names)
            elif (node.module or "").startswith("pypcd."):
                yield node.lineno, node.module or ""
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pypcd":
            yield node.lineno, f"pypcd.{node.attr}"


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_nothing_is_imported_upwards() -> None:
    wrong = []
    for path in FILES:
        part = part_of(path)
        for line, name in imported(TREES[path]):
            target = name.split(".")[1]
            target = pypcd._HOME_OF.get(target, target).partition(".")[0]
            if (part, name) in DOORS:
                continue
            if part not in FRONT and target != "__version__" and LAYER_OF[target] > LAYER_OF[part]:
                wrong.append(f"{where(path, line)} imports {name}")
    assert not wrong


def test_the_engines_modules_are_its_own() -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in FILES
        for line, name in imported(TREES[path])
        if name.startswith("pypcd.engine.") and part_of(path) != "engine"
    ]
    assert not wrong


def touched(path: Path) -> Iterator[tuple[int, str]]:
    """The names of the library, or private attributes of a model, that a module outside the engine uses."""
    own = path == LLAMA  # the subclass: private attributes of llama_cpp.Llama are its own too
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "llama_cpp":
            names = [alias.name for alias in node.names if alias.name != "llama_chat_format"]  # a module of Python
            yield from ((node.lineno, name) for name in names if name.startswith(("llama_", "ggml_", "_")))
        if not isinstance(node, ast.Attribute):
            continue
        of, name = node.value, node.attr
        if isinstance(of, ast.Name) and of.id == "llama_cpp" and name.startswith(("llama_", "ggml_", "_")):
            if not (name.startswith("__") or name == "llama_chat_format"):
                yield node.lineno, f"llama_cpp.{name}"
        elif name in ("_ctx", "_model", "_batch") and not own:
            yield node.lineno, name
        elif name.startswith("_") and not name.startswith("__"):
            is_llm = (isinstance(of, ast.Name) and of.id == "llm") or (
                isinstance(of, ast.Attribute) and of.attr == "llm"
            )
            if is_llm and name not in OURS and not own:
                yield node.lineno, f"llm.{name}"


def test_the_engine_alone_touches_the_library() -> None:
    wrong = [
        f"{where(path, line)} touches {name}"
        for path in FILES
        if part_of(path) != "engine" and path.relative_to(ROOT).as_posix() not in TOUCHES
        for line, name in touched(path)
    ]
    assert not wrong


def test_what_pypcd_raises_is_of_its_own_kinds() -> None:
    """The command line tells mistakes of the user's from faults of ours by them."""
    wrong = []
    for path in FILES:
        if path.name == "_amx_probe.py":  # a script, which imports nothing of pypcd
            continue
        for node in ast.walk(TREES[path]):
            made = node.exc if isinstance(node, ast.Raise) else node.value if isinstance(node, ast.Return) else None
            made = made.func if isinstance(made, ast.Call) else made
            if isinstance(made, ast.Name) and made.id in ("ValueError", "TypeError"):
                wrong.append(f"{where(path, node.lineno)} has {made.id}; allowed: InputError, ArgumentError")
    assert not wrong


def test_what_the_engine_offers_is_used() -> None:
    beside = [ast.parse(path.read_text(encoding="utf-8")) for path in RESEARCH.rglob("*.py")]
    trees = [*(TREES[path] for path in FILES if part_of(path) != "engine"), *beside]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "pypcd.engine":
            names |= {alias.name for alias in node.names}
    offered = {
        name for name, thing in vars(engine).items() if name[0] != "_" and not isinstance(thing, types.ModuleType)
    }
    assert not offered - names
