"""Reads the documents of requests to llama-server, finds the passages that are repeated before the question, and writes the prompt;
and reads the settings of requests.

llama-server (cpp/server/server-pcd-documents.cpp) has up to two of these processes. Each line on one's standard input is a request, and
the lines on its standard output are calls, which llama-server answers, since it has the model, and last {"answer": …}, {"error": …},
which is for the client, or {"fault": …}, which is a mistake of this program. It ends if a request takes more seconds than its
argument says, without those in which llama-server looks at the documents:

    a chat        {"messages": […], "documents": […], "replay": true, "read": 4096, "model": {…}, "n_ctx": 4096, "bos": 1, "disk": {…}}
    a file        {"document": {"filename": …, "file_data": …}}
    a setting     {"setting": "paper:beta=1.5", "base": "unsure", "fixed": {…}}; see pypcd.server.requested()
    a beginning   {"keep": [tokens], "disk": {…}, "about": {…}}: what is kept on disk of a prompt
    calls         {"render": messages}, {"tokenize": [text, add_bos, special]}, {"pieces": [tokens]}, {"save": path},
                  {"attention": {"tokens": […], "n_past": 4000, "heads": [layer, head, …], …}}: what the tokens behind n_past pay to each
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp.llama_chat_format import ChatFormatterResponse

from pypcd import engine
from pypcd.ask.messages import notes_of, prompt_of, sources_of
from pypcd.ask.reading import chosen, read_of
from pypcd.decode import Replay
from pypcd.decode.method import Edited, fitted
from pypcd.decode.prompt_cache import MIN_TOKENS, N_LEFT, PromptCache, id_of
from pypcd.document import SPACE
from pypcd.document.apart import end_with_parent, limit
from pypcd.errors import MENDABLE, InputError, PCDError, UnsupportedError
from pypcd.find import Found, bm25
from pypcd.find.heads import Heads
from pypcd.llama.saved_state import weights_id
from pypcd.prompt import Elsewhere
from pypcd.server import requested
from pypcd.server.chats import document_in, field, is_text, talk_of

MEMORY = 2 << 30  # bytes that a request may take
LONGEST = 2000  # characters of an error

_OURS = ("user", "system")  # whose messages are written as pypcd writes them


class Model(Elsewhere):
    """llama-server's."""

    def __init__(self, call: Callable[[str, Any], Any]) -> None:
        self.bos, self.model_path = -1, ""
        self.metadata: Mapping[str, str] = {}
        self.messages: Sequence[dict[str, Any]] = ()  # that are rendered, with what is not text in them
        self.names: list[str] = []  # of their documents
        self.disk: Mapping[str, Any] | None = None
        self.call = call

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        tokens: list[int] = self.call("tokenize", [text.decode(), add_bos, special])
        return tokens

    def token_bos(self) -> int:
        return self.bos

    def pieces(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, str, bool]]:
        for numbers, letters, defined in self.call("pieces", tokens):
            yield bytes(numbers), letters, defined

    def render(self, messages: list[Any]) -> ChatFormatterResponse:
        whole = []
        for given, made in zip(self.messages, messages):
            is_said = given["role"] in _OURS or (given["role"] == "assistant" and isinstance(given["content"], str))
            whole.append({**given, "content": made["content"]} if is_said else given)
        # llama.cpp takes a template's beginning of text away, and its tokenizer adds one, which here the template alone decides on
        template = self.metadata.get("tokenizer.chat_template", "")
        own = self.pieces([self.bos]) if self.bos >= 0 else ()
        begins = "bos_token" in template or any(letters in template for _, letters, _ in own)
        return ChatFormatterResponse(prompt=self.call("render", whole), added_special=bool(template) and not begins)

    @property
    def weights_id(self) -> str:
        return weights_id(self.model_path)

    def look(
        self, past: Sequence[int], tokens: Sequence[int], n_text: int, heads: Heads | None
    ) -> dict[int, npt.NDArray[np.float32]]:
        """As Session.attention(), but of all heads together."""
        pairs = [(il, head) for il, some in (heads or {}).items() for head in some]
        asked = {
            **_beginning(past[: max(n_text - N_LEFT, 0)], self.disk),
            "tokens": [*past, *tokens],
            "n_past": len(past),
            "heads": [number for pair in pairs for number in pair],
            **_UNTOLD,
            "names": self.names,
        }
        reply = self.call("attention", asked)
        if "refusal" in reply:
            raise UnsupportedError(reply["refusal"])
        return {0: np.array([reply["pays"]], np.float32)}


def _chat(request: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The tokens of a chat's prompt, or, if there is more than text in it, its messages with the documents' texts; and the passages."""
    wanted, messages = request["replay"], request["messages"]
    if not (wanted is None or isinstance(wanted, bool)):
        raise InputError(f"Field 'replay': it is {json.dumps(wanted)[:80]}; allowed: true, false")
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        return {"messages": messages}  # which llama.cpp refuses
    talk = talk_of(messages, request["documents"])
    names = [document.name for message in talk for document in message["documents"]]
    with field("read"):
        read = read_of(request["read"])
    if not is_text(talk):
        note = "the messages are not text alone" if wanted is not False or read else ""
        told = {"names": names, "passages_note": note, "documents_note": notes_of(talk)}
        return {"messages": _with_texts(messages, talk, model), **told}
    model.messages, model.names, model.disk = messages, names, request["disk"]
    model.model_path, model.metadata = request["model"]["path"], request["model"]["metadata"]
    for message in talk:  # the others' are left as they are
        message["role"] = message["role"] if message["role"] in _OURS else "assistant"
    n_ctx = request["n_ctx"]
    with field("read"):
        turns, said = chosen(model, talk, read, n_ctx)
    prompt = prompt_of(turns)
    edited = Edited(prompt)
    if wanted is not False and talk[-1]["role"] != "user":
        edited = Edited(prompt, Found(note="the last message is not the user's"))
    elif wanted is not False and talk[-1]["content"].strip():
        edited = Replay().repeated(model, prompt, chat=True, look=model.look)
    _, found, laid = fitted(model, prompt, edited, chat=True, n_ctx=n_ctx)
    sources, note = sources_of(found, turns, said)
    return {
        "tokens": laid.tokens,
        **_beginning(laid.tokens[: max(laid.n_text - N_LEFT, 0)], request["disk"]),
        "names": names,
        "passages": [dataclasses.asdict(passage) for passage in sources],
        "passages_note": note,
        "documents_read": said,
        "documents_note": notes_of(turns),
    }


def _with_texts(
    messages: Sequence[dict[str, Any]], talk: Sequence[Mapping[str, Any]], model: Model
) -> Sequence[dict[str, Any]]:
    """Messages with pictures or other parts, and the documents' texts before these."""
    for message, own in zip(messages, talk):
        text = SPACE.join(document.text for document in own["documents"])
        if not text:
            continue
        if model.tokenize(text.encode(), False, special=True) != model.tokenize(text.encode(), False):
            raise InputError(
                "Field 'file': a document has a control token of this model's in it, such as <|im_end|>, and beside pictures "
                "it would not be read as text; take it out, or ask without pictures"
            )
        content = message["content"]
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        message["content"] = [{"type": "text", "text": text + SPACE}, *parts]
    return messages


def _id(disk: Mapping[str, Any]) -> str:
    given = types.SimpleNamespace(**disk["settings"])
    return id_of(disk["weights"], engine.cache_settings(given, disk["scaling"], disk["slides"], disk["n_ctx"]))


def _beginning(tokens: Sequence[int], disk: Mapping[str, Any] | None) -> dict[str, Any]:
    """The beginning of a prompt that is kept for other questions, and the longest part of it that is on disk."""
    cache, told = PromptCache(), {**_NO_BEGINNING, "n_kept": len(tokens)}
    if not disk or not cache.limit or len(tokens) < MIN_TOKENS:
        return told
    told["is_kept"] = False
    if entry := cache.use(_id(disk), tokens, head=disk["head"]):
        is_kept, n = entry.n_tokens == len(tokens), entry.n_tokens
        told |= {"is_kept": is_kept, "path": str(entry.path), "n_on_disk": n, "n_spared": MIN_TOKENS}
    return told


_NO_BEGINNING = {"n_kept": 0, "is_kept": True, "path": "", "n_on_disk": 0, "n_spared": 0}
_UNTOLD = {"names": [], "passages": [], "passages_note": "", "documents_read": "", "documents_note": ""}


def _keep(request: Mapping[str, Any], model: Model) -> dict[str, Any]:
    disk = request["disk"]
    about = {"model": disk["model"], **request["about"]}
    PromptCache().keep(_id(disk), request["keep"], about, lambda path: int(model.call("save", path)))
    return {}


def _answer(request: Mapping[str, Any], model: Model) -> dict[str, Any] | None:
    if "messages" in request:
        return {**_NO_BEGINNING, **_UNTOLD, **_chat(request, model)}
    if "setting" in request:
        return requested(**request)
    if "keep" in request:
        return _keep(request, model)
    document = document_in(request["document"])
    n_tokens = len(model.tokenize(document.text.encode(), False))
    told = {name: getattr(document, name) for name in ("name", "text", "pages", "unit", "note")}
    return {**told, "n_tokens": n_tokens}


class Log(logging.Handler):
    """Warnings, for llama-server's log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    lines, out, errors = sys.stdin.buffer, os.fdopen(os.dup(1), "wb"), os.dup(2)
    seconds = float(sys.argv[1])
    threading.stack_size(1 << 20)  # llama-server's are large, and would count as memory that is taken
    end_with_parent()
    for stream in (1, 2):  # what libraries write is no answer, and nobody reads it
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    bm25.load()  # before memory is limited: it loads what it finds
    limit(MEMORY)

    def write(message: Mapping[str, Any]) -> None:
        out.write(json.dumps(message).encode() + b"\n")
        out.flush()

    def begin() -> None:
        faulthandler.dump_traceback_later(seconds, file=errors, exit=True)  # its thread needs no lock of Python's

    def call(name: str, given: Any) -> Any:
        if name == "attention":  # which waits for a slot
            faulthandler.cancel_dump_traceback_later()
        write({name: given})
        reply = json.loads(lines.readline())
        if name == "attention":
            begin()
        if "error" in reply:
            raise PCDError(reply["error"])
        return reply["reply"]

    model, log = Model(call), Log()
    engine.logger.addHandler(log)
    for line in lines:
        log.lines.clear()
        begin()
        try:
            request = json.loads(line)
            model.bos = request.get("bos", -1)
            answer = _answer(request, model)
            write({"answer": answer, "log": log.lines})
        except MENDABLE as error:
            said = str(error)  # what was sent may be in it
            write({"error": said if len(said) <= LONGEST else f"{said[: LONGEST // 2]} … {said[-LONGEST // 2 :]}"})
        except MemoryError:
            write({"error": f"the documents take more than {MEMORY >> 30} GiB of memory; send less, or their texts"})
        except Exception as error:  # noqa: BLE001  # the next request may go well
            write({"fault": f"{type(error).__name__}: {error}"})
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
