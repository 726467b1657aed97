"""Texts that a tokenizer reads with a deep recursion. llama.cpp splits a text by regular expressions first, for most BPE tokenizers with
std::regex, which calls itself for each character of a match: a few ten thousand letters, digits, signs or spaces in a row end the process."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import llama_cpp

from pypcd.engine._calls import vocabulary
from pypcd.errors import InputError, PCDError

__all__ = ["with_stack"]

_T = TypeVar("_T")
_PER_CHARACTER = 1024  # bytes of stack: 600 were the most that an expression of llama.cpp's took
_SHORT = 500  # characters that any thread's stack has room for
_MOST = 1 << 20  # characters of one match
# behind which no match goes on, by the name of the tokenizer's expressions; None: of all others
_WORDS = {
    "exaone-moe": re.compile(rb"(?:[A-Za-z\x80-\xff]+ ?)+|[^\sA-Za-z]+\s?|\s+"),
    None: re.compile(rb"\S+\s*|\s+"),
}

_size_lock = threading.Lock()  # threading.stack_size is for all threads that start


def with_stack(llm: llama_cpp.Llama, text: bytes, tokenize: Callable[[], _T]) -> _T:
    """What `tokenize` makes of a text, with a stack that has room for it.

    Raises:
        ValueError: too many characters in a row, for any stack.
        PCDError: the system gives no such stack.
    """
    if len(text) <= _SHORT or llama_cpp.llama_vocab_type(vocabulary(llm)) != llama_cpp.LLAMA_VOCAB_TYPE_BPE:
        return tokenize()
    words = _WORDS.get(llm.metadata.get("tokenizer.ggml.pre"), _WORDS[None])
    n = max(len(word[0]) for word in words.finditer(text))
    if n > _MOST:
        raise InputError(
            f"of the text, {n} bytes in a row are one word to this model's tokenizer; allowed: {_MOST}, since llama.cpp calls itself "
            "for each and would end the process; put white space or line ends in between"
        )
    return tokenize() if n <= _SHORT else _in_thread(tokenize, n * _PER_CHARACTER + (1 << 20))


def _in_thread(call: Callable[[], _T], size: int) -> _T:
    """call() in a thread whose stack has so many bytes; they take memory when they are used. The thread is waited for in any case, since the
    model has to stay until it has ended."""
    with ThreadPoolExecutor(1, "pypcd tokenizes") as pool:
        with _size_lock:
            before = threading.stack_size(-(-size // 65536) * 65536)
            try:
                made = pool.submit(call)
            except RuntimeError as error:
                raise PCDError(
                    f"the text cannot be tokenized: the system gives a thread no stack of {size >> 20} MiB ({error}); take a shorter text"
                ) from error
            finally:
                threading.stack_size(before)
        return made.result()
