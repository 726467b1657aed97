"""pypcd mcp: answers questions about documents, as a tool of the Model Context Protocol on stdin and stdout.

stdout is the protocol's alone: while it is served, all else that is printed goes to stderr. Exit status: 0 once stdin is closed, after
Ctrl-C or SIGTERM; 1 or 2 for a mistake in the arguments.
"""

# without postponed annotations, since the tool's name types that are imported when it is made

import argparse
import asyncio
import dataclasses
import functools
import logging
import os
import pathlib
import signal
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pypcd import Llama, ask
from pypcd.ask import Answer, Source
from pypcd.cli import _figures, _options
from pypcd.cli._text import sentence
from pypcd.document.folder import read_files
from pypcd.errors import MENDABLE, InputError, require
from pypcd.gguf import resolve_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _options.add_model(parser)
    parser.usage = "pypcd mcp MODEL FOLDER ... [options]"
    parser.epilog = "An MCP client starts it, and speaks on stdin and stdout (docs/ask.md). Needs the package mcp."
    what = "documents below it may be asked about; no other file is read"
    parser._optionals.add_argument("folder", metavar="FOLDER", nargs="+", help=what)
    _options.add_n_ctx(parser)
    _options.add_machine(parser)


def run(args: argparse.Namespace) -> int:
    require("mcp.server.mcpserver", "pypcd mcp", package="'llama-pcd[mcp]'")
    folders = [pathlib.Path(os.path.realpath(os.path.expanduser(folder))) for folder in args.folder]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; allowed: folders of documents")
    resolve_model(args.model)  # raise errors at once; the first question opens it, since clients list tools more often
    options = {"n_ctx": args.n_ctx, **_options.machine_options(args)}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(0))  # the thread that waits for a line of stdin cannot be woken
    _server(functools.cache(lambda: Llama(args.model, **options)), folders).run("stdio")
    return 0


@dataclasses.dataclass(frozen=True)
class Result:
    """What the tool returns beside the same as text."""

    answer: str
    passages: list[Source]
    read: str
    note: str


def _server(opened: Callable[[], Llama], folders: Sequence[pathlib.Path]) -> Any:
    import anyio
    from mcp.server.mcpserver import Context, MCPServer
    from mcp.types import CallToolResult, TextContent

    handler = logging.StreamHandler()  # mcp's own would show what other packages log for their developers
    handler.setLevel(logging.WARNING)
    logging.basicConfig(handlers=[handler])
    server = MCPServer("pypcd")
    lock = anyio.Lock()

    @server.tool(
        name="ask",
        description="Answer a question about documents (texts, PDF, DOCX, XLSX, PPTX, EPUB, HTML), with the passages that it is about and where they stand. "
        f"Documents are files and folders below {_listed(folders)}, named by their paths there, such as report.pdf; all if none is named. "
        "Of long ones the parts are read that share words with the question: read, a number of tokens, says how much.",
    )
    async def tool(
        question: str, context: Context, documents: list[str] | None = None, read: int | None = None
    ) -> Annotated[CallToolResult, Result]:
        try:
            async with lock:  # one question at a time
                answer = await anyio.to_thread.run_sync(answered, question, documents or ["."], read, context)
        except (*MENDABLE, OSError) as error:
            return CallToolResult(content=[TextContent(text=sentence(error))], is_error=True)
        found = {"answer": answer.text, **_figures.passages(answer)}
        return CallToolResult(content=[TextContent(text=_readable(answer))], structured_content=found)

    def answered(question: str, documents: list[str], read: int | None, context: Context) -> Answer:
        def cancelled() -> bool:
            """By the client, or since stdin is closed."""
            try:
                anyio.from_thread.check_cancelled()
            except asyncio.CancelledError:
                return True
            return False

        def progress(n: int, total: int) -> None:
            if not cancelled():
                anyio.from_thread.run(context.report_progress, n, total, "reading")

        llm = opened()
        llm.progress = progress
        paths = [path for name in documents for path in _paths(name, folders)]
        found, left_out = read_files(paths, cancelled)
        asking = ask.stream(llm, found, question, read=read)
        for _ in ask.stoppable(llm, asking, cancelled):
            pass
        answer = asking.answer
        return dataclasses.replace(answer, note="; ".join(filter(None, (left_out, answer.note))))

    return server


def _readable(answer: Answer) -> str:
    places = (f"{n}. {one.document}, {one.place}:\n{one.text}" for n, one in enumerate(answer.passages, 1))
    read = f"Read {answer.read}." if answer.read else ""
    return "\n\n".join(filter(None, [answer.text.strip(), *places, read, answer.note]))


def _listed(folders: Sequence[pathlib.Path]) -> str:
    return ", ".join(map(str, folders))


def _paths(name: str, folders: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Where the file of this name is, or the folders, links resolved.

    Raises:
        ValueError: it is in none of the folders, by its name or by a link; or there is none.
    """
    paths = [pathlib.Path(os.path.realpath(folder / name.replace("\0", "\ufffd"))) for folder in folders]
    inside = [path for path in paths if any(path.is_relative_to(folder) for folder in folders)]
    # os.path takes names of any length
    found = [path for path in inside if os.path.isfile(path)][:1] or [path for path in inside if os.path.isdir(path)]
    if not found:
        what = f"there is no document {name!r}" if inside else f"{name!r} is outside of the folders that may be read"
        raise InputError(f"{what}; allowed: files below {_listed(folders)}")
    return found
