"""pypcd completion: the script that lets a shell complete pypcd's commands, options and file names."""

from __future__ import annotations

import argparse

import shtab

from pypcd.cli import COMMANDS, make_parser

SHELLS = ("bash", "zsh")

# what an argument is called in the help -> what the shell completes it with
_FILES = {
    "MODEL": shtab.glob("*.gguf"),
    "FILE": shtab.FILE,
    "PATH": shtab.FILE,
    "DIR": shtab.DIRECTORY,
    "FOLDER": shtab.DIRECTORY,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd completion {bash,zsh}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """write it once, for the shells you open from then on:
  bash, with the package bash-completion:
    d=~/.local/share/bash-completion/completions; mkdir -p $d
    pypcd completion bash > $d/pypcd
  bash, without it, in ~/.bashrc:
    eval "$(pypcd completion bash)"
  zsh, into a folder of $fpath:
    pypcd completion zsh > "${fpath[1]}/_pypcd"
"""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash or zsh")


def run(args: argparse.Namespace) -> int:
    parser, commands = make_parser(COMMANDS)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:  # the list of commands, which the help has elsewhere
            action.help = None
    for command in commands.values():
        for action in command._actions:
            if action.metavar in _FILES:
                action.complete = _FILES[action.metavar]  # type: ignore[attr-defined]  # shtab reads it
    print(shtab.complete(parser, args.shell))
    return 0
