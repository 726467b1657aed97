"""A call's own setting: it is in force while the call runs, and while each piece of its stream is made.

Knows nothing of what settings do, or of what is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from pypcd import arguments, engine
from pypcd.config import PCDSetting

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["call", "steps"]

_T = TypeVar("_T")


def call(llm: Llama, setting: PCDSetting, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """function(*args, **kwargs) under a setting, which also applies while a returned stream is read."""
    if len(args) > 1:  # by their names, so that they are checked too
        args, kwargs = (), dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    kwargs = arguments.check_call(llm.n_vocab(), kwargs)
    if setting is None:
        return function(*args, **kwargs) if kwargs.get("stream") else _whole(llm, function, *args, **kwargs)
    setting = llm._resolve(setting) or False  # once, for the call and for a returned stream
    with llm._pcd_set_to(setting):
        result = function(*args, **kwargs)
    return steps(llm, setting, result) if isinstance(result, Iterator) else result


def _whole(llm: Llama, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call that ends before anybody else uses the model: generate() may turn PCD off, once, and it is turned on here again."""
    before, was_whole = llm.pcd, llm._is_whole
    llm._is_whole = True
    try:
        return function(*args, **kwargs)
    finally:
        llm._is_whole = was_whole
        if llm.pcd is not before and engine.is_open(llm):
            llm._apply(before)


def steps(llm: Llama, setting: PCDSetting, iterator: Iterator[_T]) -> Generator[_T, Any, None]:
    """The same iterator, with every step run under a setting, and nothing between the steps."""
    config = llm._resolve(setting)  # raise errors now, not when the stream is first read

    def under_it() -> Generator[_T, Any, None]:
        sent = None
        try:
            while True:
                with llm._turn, llm._pcd_set_to(False if config is None else config):
                    try:
                        item = iterator.send(sent) if isinstance(iterator, Generator) else next(iterator)
                    except StopIteration:
                        return
                sent = yield item
        finally:
            if isinstance(iterator, Generator):
                iterator.close()

    return under_it()
