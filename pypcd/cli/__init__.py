"""The `pypcd` command: its subcommands, and how their errors are reported.

Each subcommand is a module with add_arguments(parser) and run(args) -> exit status. Only the chosen one is imported, so
that help, the version and a misspelt command are answered at once. Logs go to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pypcd import __version__
from pypcd.cli import _terminal
from pypcd.cli._text import sentence
from pypcd.errors import MENDABLE, InputError, did_you_mean
from pypcd.library import NOT_INSTALLED

__all__ = ["COMMANDS", "main", "make_parser", "module_of", "reported"]

# name -> what it does; those that a newcomer needs come first
COMMANDS = {
    "chat": "talk with a model in the terminal",
    "generate": "continue a prompt given by -p or on standard input",
    "serve": "answer programs over HTTP, as OpenAI's API does",
    "mcp": "answer an MCP client's questions about documents in folders",
    "rpc-server": "compute a part of models that other machines open with --rpc",
    "answer": "answer a question about a text with any decoding method",
    "compare": "answer your own questions by several methods, side by side",
    "probe": "find the heads of a model that look passages up",
    "cache": "list documents that were read before, or forget them",
    "explain": "show each token's candidates before and after the contrast",
    "info": "show the library, the machine and what PCD does to a model",
    "bench": "time plain decoding and PCD side by side",
    "eval": "measure decoding methods on long-context tasks",
    "tune": "find the PCD setting that helps a model and harms nothing",
    "demo": "print a question that the included model can answer",
    "completion": "print the script that completes pypcd's options in your shell",
}

_LEFT = "left the package; in a clone of its repository: python -m research"

# what was a command, or an option of one, and what there is instead
_MOVED = {
    **{name: f"{_LEFT}.{name}" for name in ("salience", "plot", "spectrum")},
    "nocache": "left the package; commit f5c5ab6 compares PCD with the KV cache and without it",
    "lab": f"{_LEFT}.NAME, with salience, plot or spectrum for NAME",
    "--paper": f"{_LEFT}.eval MODEL --paper TABLE",
    "--graph": "left the package; commit 7d6ac68 counts graphs and the host's time",
    "--sequences": "left the package; one text is measured at a time",
    "--data": "left the package, and so did the tasks that it was for; --task says what asks their questions now",
    "--all": "left the package; name the methods with --method",
    "--question": "is written without its name: pypcd demo K",
    **dict.fromkeys(("--n", "--pcd"), "left pypcd demo; pypcd eval demo measures, with --n and --method pcd:SETTING"),
    "--picture": "left the package; commit 2e7ce90 draws it, by python -m research.one_answer",
    "--html": "left the package; --json has all of it, and the page of 'pypcd serve' shows tokens with their candidates",
}


def make_parser(commands: Collection[str]) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of `pypcd`, and those of its commands by name.

    Args:
        commands: those that get their options; the modules of the others are not imported.
    """
    parser = argparse.ArgumentParser(
        prog="pypcd",
        usage="pypcd [-h] [--version] COMMAND ...",
        description=f"Better answers from long prompts: replay, and\nPositional Contrastive Decoding (PCD).\n\ncommands:\n{_listed(COMMANDS)}",
        epilog="'pypcd COMMAND --help' lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,  # the usage line has both options
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"pypcd {__version__}", help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(prog="pypcd", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    return parser, {name: _add(subparsers, name, text, commands) for name, text in COMMANDS.items()}


def _listed(commands: Mapping[str, str]) -> str:
    """Commands and what they do, in the columns of the terminal."""
    first = max(map(len, commands)) + 4
    room = max(_terminal.width() - first, 16)
    lines = {name: textwrap.wrap(text, room, break_on_hyphens=False) for name, text in commands.items()}
    return "\n".join(f"  {name:<{first - 2}}" + f"\n{' ' * first}".join(text) for name, text in lines.items())


def _add(subparsers: Any, name: str, text: str, commands: Collection[str]) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    if name in commands:
        module = module_of(name)
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)
    return parser


def module_of(name: str) -> Any:
    """A command's module."""
    return importlib.import_module(f"pypcd.cli.{name.replace('-', '_')}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status.

    Raises:
        SystemExit: the arguments are wrong, or ask for help or the version.
    """

    def run() -> int:
        args = _parse(sys.argv[1:] if argv is None else list(argv))
        return int(args.run(args))

    return reported(run)


def reported(run: Callable[[], int]) -> int:
    """What a command returns; or, after an error, 2 for a mistake in what was typed or in a file that was given, as for what argparse
    finds, and 1 for any other.

    What the user or the system can mend is one sentence on stderr; all else is a fault of pypcd's, and shows where it is.
    """
    _terminal.setup()
    try:
        return run()
    except KeyboardInterrupt:
        print("\npypcd: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; no error at exit either
        return 141
    except (*MENDABLE, OSError, MemoryError) as error:
        print(f"pypcd: {sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, (InputError, FileNotFoundError, IsADirectoryError)) else 1
    except Exception as error:  # noqa: BLE001
        if isinstance(error, ModuleNotFoundError) and error.name == "llama_cpp":
            print(f"pypcd: {NOT_INSTALLED}", file=sys.stderr)
            return 1
        traceback.print_exc()  # as Python would show it, and then what to do about it
        print(
            "pypcd: this is a fault of pypcd's own; please report the lines above, with what `pypcd info` prints, as an issue "
            "on the page of pypcd's repository",
            file=sys.stderr,
        )
        return 1


def _parse(argv: list[str]) -> argparse.Namespace:
    if argv and argv[0] not in COMMANDS and argv[0].endswith(".gguf"):
        argv = ["chat", *argv]
    name = next((word for word in argv if not word.startswith("-")), None)
    parser, commands = make_parser([] if name is None else [name])
    if not argv:
        parser.print_help(sys.stderr)
        sys.exit(2)
    if name is None and not {"-h", "--help", "--version"} & set(argv):
        parser.error(f"there is no option {argv[0]}; the commands: {', '.join(COMMANDS)}")
    if name is not None and name not in commands:
        if name in _MOVED:
            parser.error(f"'pypcd {name}' {_MOVED[name]}")
        parser.error(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}; the commands: {', '.join(COMMANDS)}")
    own, of_server = argv, []
    if name is not None and "--" in argv and commands[name].get_default("server_options") is not None:
        own, of_server = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    args, unknown = parser.parse_known_args(own)
    if of_server:
        args.server_options = of_server
    if unknown and name is not None:
        command, word = commands[name], unknown[0].partition("=")[0]
        if name in ("eval", "tune", "bench", "demo", "explain") and word in _MOVED:
            command.error(f"{word} {_MOVED[word]}")
        if not word.startswith("-"):
            command.error(f"unexpected argument {unknown[0]!r}")
        shown = (action for action in command._actions if action.help != argparse.SUPPRESS)
        options = [option for action in shown for option in action.option_strings]
        near = did_you_mean(word, options)
        where = "; llama-server's own stand behind --" if name == "serve" else ""
        command.error(f"there is no option {word}{near}; 'pypcd {name} --help' lists the options{where}")
    return args
