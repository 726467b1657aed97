"""Self-Extend as in llama.cpp's own programs (--grp-attn-n, --grp-attn-w)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp

from pypcd import engine
from pypcd.decode import values_of
from pypcd.decode.rows import RowSource, Stream
from pypcd.decode.session import Session
from pypcd.prompt import Prompt
from pypcd.settings.ranges import Integer, check

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["SelfExtend", "parse"]

_UNBLOCKED = (0, 1, 30)  # F32, F16, BF16 of enum ggml_type; llama_cpp does not name the last


def _can_shift(llm: Llama) -> bool:
    """Whether the cached keys can be moved. Of latent ones in blocks llama.cpp says yes, and ends the process."""
    is_latent = any(key.endswith("attention.key_length_mla") for key in llm.metadata)
    in_blocks = llm.context_params.type_k not in _UNBLOCKED
    return not (is_latent and in_blocks) and bool(llama_cpp.llama_memory_can_shift(_memory(llm)))


def _memory(llm: Llama) -> Any:
    return llama_cpp.llama_get_memory(llm.ctx)


@dataclasses.dataclass(frozen=True)
class SelfExtend(RowSource):
    """Self-Extend (arXiv 2401.01325) in llama.cpp's form: distant positions are divided by a group size.

    While the prompt is evaluated, each complete window of `width` positions before the newest one is compressed to
    width / n positions. Answers are assumed to be short: nothing is compressed during generation.

    Args:
        n: group size, 2 to 64.
        width: positions compressed at a time; a multiple of n up to 2**20.

    Raises:
        ValueError: a value is out of range.
    """

    n: int = 4
    width: int = 512

    def __post_init__(self) -> None:
        check(self, n=Integer(2, 64))
        check(self, width=Integer(self.n, 2**20, multiple_of=self.n))

    def refusal(self, llm: Llama) -> str | None:
        if engine.is_recurrent(llm):
            return "it has a recurrent state, which has no positions to divide"
        if not engine.rotates(llm):
            return "it has no rotary positions (RoPE) to divide"
        if not _can_shift(llm):
            return "the positions in this model's cache cannot be moved"
        return None

    def open(self, session: Session, prompt: Prompt, tokens: Sequence[int], *, chat: bool = False) -> Stream:
        return Stream(session, session.start(tokens, kind=self, read=lambda part: self._read(session, part)))

    def _read(self, session: Session, tokens: Sequence[int]) -> int:
        llm, n, width = session.llm, self.n, self.width
        memory = _memory(llm)
        n_past = done = 0  # positions so far; how many of them are compressed already
        step = min(llm.n_batch, width)
        for at in range(0, len(tokens), step):
            part = tokens[at : at + step]
            while n_past >= done + width:
                for i in range(1, width):  # not llama_memory_seq_div: at this version it turns keys the wrong way
                    llama_cpp.llama_memory_seq_add(memory, 0, done + i, done + i + 1, i // n - i)
                gain = width - width // n
                llama_cpp.llama_memory_seq_add(memory, 0, done + width, n_past, -gain)
                n_past -= gain
                done += width // n
            session.decode([(token, n_past + i, 0, False) for i, token in enumerate(part)])
            n_past += len(part)
        return n_past


def parse(words: Sequence[str]) -> SelfExtend:
    """From the words behind the name: self-extend:4:width=512."""
    return values_of(SelfExtend, words, "n")
