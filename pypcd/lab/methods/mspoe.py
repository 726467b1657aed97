"""Ms-PoE: each attention head sees positions at a scale of its own (arXiv 2403.04797)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pypcd import engine
from pypcd.checks import Choice, Integer, Number, check
from pypcd.decode import values_of
from pypcd.decode.rows import RowSource, Stream
from pypcd.decode.session import Session
from pypcd.errors import InputError, UnsupportedError
from pypcd.prompt import Prompt

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["MsPoE", "parse"]


@dataclasses.dataclass(frozen=True)
class MsPoE(RowSource):
    """Multi-scale positional encoding: position t becomes t / r, with one of H ratios r for each of a layer's H heads.

    Ratio i is min_ratio + (max_ratio - min_ratio) i / H. Keys have the ratio of the first query head in their group; the
    group's other query heads have their own, as in the authors' code.

    Args:
        min_ratio: more than 0; 1 keeps the model's own positions.
        max_ratio: at least min_ratio, at most 1000; the largest ratio is below it.
        first_layer: layers before it are not changed.
        order: which head has which ratio. "static": the first head the largest, the last one the smallest; this is what
            PCD's authors ran (head_type="normal" of the original code). "outlier": ratio order[h] for head h, where order
            sorts the heads by how many keys get more than three times the mean attention of the prompt's last token,
            before rotation. A prompt must then fit in one micro-batch.

    Raises:
        ValueError: a value is out of range.
    """

    min_ratio: float = 1.2
    max_ratio: float = 1.8
    first_layer: int = 2
    order: str = "static"

    def __post_init__(self) -> None:
        check(self, min_ratio=Number(0, 1000, open_below=True), first_layer=Integer(0))
        check(self, max_ratio=Number(self.min_ratio, 1000, note="at least min_ratio"))
        check(self, order=Choice(tuple(engine.HEAD_ORDERS)))

    @property
    def whole_prompt(self) -> bool:  # type: ignore[override]
        return self.order == "outlier"

    def refusal(self, llm: Llama) -> str | None:
        if self.order == "outlier" and engine.is_recurrent(llm):
            return "it has a recurrent state, which cannot go back to before the prompt's last token; use ms-poe"
        with llm._pcd_set_to(False):
            try:
                self._set(llm)
            except (UnsupportedError, InputError) as error:
                return str(error)
            engine.unset_head_ratios(llm)
        return None

    def open(self, session: Session, prompt: Prompt, tokens: Sequence[int], *, chat: bool = False) -> Stream:
        llm = session.llm
        room = min(llm.n_batch, llm.context_params.n_ubatch)
        if self.order == "outlier" and len(tokens) > room:
            raise InputError(
                f"the prompt has {len(tokens)} tokens; allowed: at most {room} with order='outlier', which needs the "
                f"whole prompt in one batch; load the model with n_batch and n_ubatch of {len(tokens)} or more, or use "
                "ms-poe"
            )
        session.plainly()
        session.on_finish(lambda: engine.unset_head_ratios(llm))
        self._set(llm)
        if self.order == "outlier" and not engine.knows_head_order(llm, self.first_layer):
            session.clear()  # the cached prompt's order of heads, if it had one, is gone

        def read(part: Sequence[int]) -> int:
            """Evaluate the whole prompt to find the order, then drop its last token, which is evaluated again."""
            engine.find_head_order(llm)
            llm.eval(tokens)
            engine.rewind(llm, len(part), 0)
            return len(part)

        return Stream(session, session.start(tokens, kind=self, read=read if self.order == "outlier" else None))

    def _set(self, llm: Llama) -> None:
        engine.set_head_ratios(llm, self.min_ratio, self.max_ratio, first_layer=self.first_layer, order=self.order)


def parse(words: Sequence[str], order: str = "static") -> MsPoE:
    """From the words behind the name: ms-poe:max_ratio=1.6:first_layer=0."""
    return values_of(functools.partial(MsPoE, order=order), words)
