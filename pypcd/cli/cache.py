"""pypcd cache: documents that were read before."""

from __future__ import annotations

import argparse
import datetime

from pypcd.cli._text import clean
from pypcd.decode.prompt_cache import LIMIT_NAME, PromptCache


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "pypcd cache [list|clear]"
    parser.epilog = (
        "chat, answer, compare, mcp, serve and llm.ask keep what a model has computed for a document, so that the next question begins at once, "
        f"tomorrow too. Files that were not used for longest go first. {LIMIT_NAME}=N allows N GiB (4); 0 keeps nothing."
    )
    parser._optionals.title = "arguments"  # one list of all, as in the other commands
    parser._optionals.add_argument(
        "action", nargs="?", choices=("list", "clear"), default="list", help="list is the default"
    )


def run(args: argparse.Namespace) -> int:
    cache = PromptCache()
    if args.action == "clear":
        print(f"{cache.clear() / 2**20:.0f} MiB removed from {cache.folder}")
        return 0
    entries = cache.entries()
    for entry in entries:
        about, used = entry.about, datetime.datetime.fromtimestamp(entry.used)
        names = ", ".join(map(str, about.get("documents", ["?"])))
        what = clean(f"{about.get('model', '?')}  {names}").replace("\n", " ")  # clients of a server choose such names
        print(f"{used:%Y-%m-%d %H:%M}  {entry.n_bytes / 2**20:6.0f} MiB  {entry.n_tokens:6d} tokens  {what}")
    total = sum(entry.n_bytes for entry in entries)
    print(f"{total / 2**20:.0f} MiB of {cache.limit / 2**20:.0f} in {cache.folder}")
    return 0
