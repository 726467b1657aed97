"""llama_cpp.server, the server written in Python, takes "pcd" in its requests while pypcd.install() is in force.

Its module `app` takes the types of requests and the answering of errors from two others when it is imported: `adapt` imports
it with ours in their place. (`pypcd serve` is another server, llama.cpp's own: server.) Imported by finder only, since it
needs what llama_cpp.server needs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError  # type: ignore[import-not-found,unused-ignore]
from pydantic import BeforeValidator, Field, create_model  # type: ignore[import-not-found,unused-ignore]

from pypcd.errors import InputError, PCDError, UnsupportedError
from pypcd.llama import Llama
from pypcd.settings.config import PCDConfig, is_profile

__all__ = ["adapt"]


class _Refused(PCDError):
    """This model cannot take the setting of a request."""


def adapt(app: Any, execute: Callable[[], None]) -> None:
    """Execute llama_cpp.server.app so that requests for completions and chat completions may have "pcd"."""
    from llama_cpp.server import errors, types

    ours = [
        (types, "CreateCompletionRequest", _request),
        (types, "CreateChatCompletionRequest", _request),
        (errors, "RouteErrorHandler", _route),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in ours]
    try:
        for (module, name, make), (_, _, base) in zip(ours, before):
            setattr(module, name, make(base))
        execute()
    finally:
        for module, name, base in before:
            setattr(module, name, base)
    app.prepare_request_resources = _prepare(app.prepare_request_resources)
    app.get_event_publisher = _publish(app.get_event_publisher)


# -- what a request may have -----------------------------------------------------------------------------------------


def _checked(value: Any) -> Any:
    if isinstance(value, str) and is_profile(value):
        raise InputError(f"pcd is {value!r}, a file; allowed in a request: true, false, presets and values")
    try:
        PCDConfig.resolve(value)
    except InputError as error:
        raise InputError(str(error).replace(", or a profile's file (.json)", "")) from None
    return value


def _request(base: Any) -> Any:
    setting = Annotated[bool | str | dict[str, Any] | None, BeforeValidator(_checked)]
    about = "Positional Contrastive Decoding for this request: true, false, a preset or values; null: as the server was started."
    field: Any = (setting, Field(default=None, description=about, examples=["unsure", {"beta": 1.5}, False]))
    return create_model(base.__name__, __base__=base, __module__=base.__module__, pcd=field)


# -- what is done with it --------------------------------------------------------------------------------------------


def _prepare(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare_request_resources(body: Any, llama_proxy: Any, body_model: Any, kwargs: dict[str, Any]) -> Any:
        llm = original(body, llama_proxy, body_model, kwargs)
        setting = kwargs.pop("pcd", None)
        if setting is None:
            return llm
        if not isinstance(llm, Llama):  # opened after uninstall()
            raise _Refused('this model takes no "pcd": it was opened without pypcd')
        try:
            kwargs["pcd"] = PCDConfig.resolve(setting, llm.pcd) or False
        except InputError as error:
            raise _Refused(str(error)) from None
        return llm

    return prepare_request_resources


def _publish(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    async def get_event_publisher(
        request: Any, inner_send_chan: Any, body: Any, body_model: Any, llama_call: Any, kwargs: dict[str, Any]
    ) -> None:
        def call(llm: Any, **kwargs: Any) -> Iterator[Any]:
            try:
                chunks: Iterator[Any] = getattr(llm, llama_call.__name__)(**kwargs)  # llama_call is the stock class's
            except (UnsupportedError, ValueError) as error:
                return iter([{"error": _error(str(error), _blamed(error, kwargs.get("pcd")))}])
            return chunks

        try:
            await original(request, inner_send_chan, body, body_model, call, kwargs)
        except _Refused as error:  # the answer has begun: a status cannot be sent any more
            async with inner_send_chan:
                await inner_send_chan.send({"data": json.dumps({"error": _error(str(error))})})
                await inner_send_chan.send({"data": "[DONE]"})

    return get_event_publisher


def _route(base: Any) -> Any:
    class RouteErrorHandler(base):  # type: ignore[misc]
        def error_message_wrapper(self, error: Exception, body: Any = None) -> tuple[int, Any]:
            if isinstance(error, RequestValidationError):
                for found in error.errors():
                    if tuple(found["loc"][:2]) == ("body", "pcd"):
                        return 400, _error(found["msg"].removeprefix("Value error, "))
            if isinstance(error, _Refused):
                return 400, _error(str(error))
            status, message = super().error_message_wrapper(error, body)
            if status == 500 and isinstance(error, (UnsupportedError, ValueError)):
                # what pypcd.Llama checks is the client's mistake
                return 400, _error(str(error), _blamed(error, getattr(body, "pcd", None)))
            return status, message

    return RouteErrorHandler


def _blamed(error: Exception, setting: Any) -> str | None:
    return "pcd" if isinstance(error, UnsupportedError) and setting is not None else None


def _error(message: str, param: str | None = "pcd") -> dict[str, Any]:
    return {"message": message, "type": "invalid_request_error", "param": param, "code": None}
