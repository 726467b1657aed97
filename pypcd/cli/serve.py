"""pypcd serve: llama.cpp's own server, with PCD for each request as it asks.

Exit status: 0 after Ctrl-C or SIGTERM, 1 if the model does not load or the server dies, 2 for a mistake in the arguments.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable, Collection
from typing import Any

from pypcd.cli import _options, _terminal
from pypcd.cli._text import sentence
from pypcd.errors import MENDABLE, InputError
from pypcd.server import OptionError, Server, model_list, show_options
from pypcd.server.options import of_environment
from pypcd.settings.config import load, typed

_LOCAL = ("127.0.0.1", "::1", "localhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_model(parser, nargs="+", what="a GGUF file, 'demo', a folder of them, or models.ini; several too")
    parser.usage = "pypcd serve MODEL[=SETTING] ... [options] [-- llama-server's own options]"
    parser.epilog = (
        'A request chooses with "pcd": true, false, a preset or values in its body, or by its model: NAME:pcd, '
        "NAME:pcd-unsure. See docs/serve.md. Ctrl-C ends the server."
    )
    add = parser.add_argument
    add(
        "--pcd",
        metavar="SETTING",
        help="the setting if neither a request nor MODEL names one: off (default), unsure ...",
    )
    add(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="address to listen on, or several with commas (default: 127.0.0.1)",
    )
    add("--port", metavar="N", type=_options.at_least(0), default=8080, help="0: any free one (default: 8080)")
    add(
        "--parallel",
        metavar="N",
        type=_options.at_least(1),
        default=4,
        help="requests at once; each has its part of the context (4)",
    )
    add("--api-key", metavar="KEY", help="what clients have to send")
    _options.add_rpc(parser)
    add("--verbose", action="store_true", help="the server's own log, on stderr")


def run(args: argparse.Namespace) -> int:
    if {"--help", "-h"} & set(args.server_options):
        return show_options()
    shows_log = args.verbose  # else, before the server is ready, an error is told in a sentence instead

    def log(line: str) -> None:
        if shows_log:
            print(line, file=sys.stderr, flush=True)

    quiet = [] if args.verbose or "log-verbosity" in of_environment() else ["--log-verbosity", "1"]
    left_out: list[str] = []
    try:
        setting = load("off" if args.pcd is None else args.pcd)
        server = Server(
            model_list.read(args.model, left_out),
            pcd=setting,
            host=args.host,
            port=args.port,
            parallel=args.parallel,
            api_key=args.api_key,
            rpc_servers=args.rpc,
            options=[*quiet, *args.server_options],
            log=log,
        )
    except (*MENDABLE, OSError) as error:  # each of them is a mistake in what was typed
        raise InputError(sentence(error)) from error
    for model in server.models:
        _options.note_of_profile(setting if model.pcd is None else model.pcd, model.path)
    for remark in [*left_out, *server.remarks]:
        _terminal.note(remark)
    reached = [host for host in server.hosts if host not in _LOCAL]
    if reached and not server.has_key:
        _terminal.note(
            f"anybody who reaches {' or '.join(reached)} can use this server; --api-key KEY keeps others out"
        )
    with _terminal.interruptible(signal.SIGTERM) as stopped, server.running():
        try:
            ready = _wait(server, stopped, enabled=not args.verbose)
        except OptionError as error:
            raise InputError(str(error)) from error
        if ready:
            shows_log = True
            refusals = server.refusals()
            for name, why in refusals.items():
                _terminal.note(f"{name}: {why}" if len(server.models) > 1 else why)
            if args.pcd is None and any(one.pcd is None and one.name not in refusals for one in server.models):
                _terminal.note(
                    'PCD is off; "pcd": "unsure" in a request turns it on for that one, --pcd SETTING for all'
                )
            _terminal.write(_greeting(server, refusals))
            server.wait(stopped)
    return 0


def _wait(server: Server, stopped: Callable[[], bool], *, enabled: bool) -> bool:
    """Server.wait_until_ready() with a progress bar."""
    bar = _terminal.Bar(100, "loading", enabled=enabled)

    def waiting() -> bool:
        bar.update(server.loaded - bar.n)
        return stopped()

    with bar:
        return server.wait_until_ready(waiting)


DEMO_QUESTION = (  # answered with the last value if PCD is off
    "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n"
    '{"9c34-54c5": "8044-44b2", "1d2e-77a0": "5fa0-913c", "0b71-2c9d": "c1d8-3e05"}\n\n\n'
    'Key: "9c34-54c5"\nThe value associated with the specified key is: '
)


def _greeting(server: Server, without: Collection[str]) -> str:
    """Where it is, and a command that asks it something.

    Args:
        without: the models that cannot run PCD.
    """
    names = list(server.configs)
    pcd = {name: "off" if name in without else typed(config) for name, config in server.configs.items()}
    wanted = f"{names[0]}:pcd-{pcd[names[0]]}" if pcd[names[0]] != "off" else ""  # to show how a name chooses
    if len(names) == 1:
        head = f"{names[0]} | PCD {pcd[names[0]]} unless a request says otherwise | Ctrl-C to end\n"
    else:
        width = max(map(len, names))
        head = f"{len(names)} models | Ctrl-C to end\n"
        for name, setting in pcd.items():
            later = "" if name in server.at_start else "; loaded when it is asked for"
            head += f"  {name:<{width}}  PCD {setting} unless a request says otherwise{later}\n"
    body: dict[str, Any] = {
        "model": wanted if wanted in server.names() else names[0],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 64,
    }
    if names[0] == "demo":  # which knows nothing of France
        body.update(
            messages=[{"role": "user", "content": DEMO_QUESTION}], max_tokens=16, temperature=0, pcd="window:window=16"
        )
    key = " -H 'Authorization: Bearer KEY'" if server.has_key else ""
    page = f"  page    {server.url}/\n" if server.has_page() else ""
    return (
        f"{head}"
        f"{page}"
        f"  OpenAI  {server.url}/v1\n"
        f"  try     curl -s {server.url}/v1/chat/completions{key} -d {shlex.quote(json.dumps(body))}\n"
    )
