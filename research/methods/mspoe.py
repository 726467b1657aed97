"""Ms-PoE: each attention head sees positions at a scale of its own (arXiv 2403.04797)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.decode import values_of
from pypcd.decode.rows import RowSource, Stream
from pypcd.decode.session import Rows2D, Session
from pypcd.errors import InputError, UnsupportedError
from pypcd.prompt import Prompt
from pypcd.settings.ranges import Choice, Integer, Number, check
from research.methods.heads import HeadRatios, head_counts, refusal

if TYPE_CHECKING:
    from pypcd.llama import Llama

__all__ = ["MsPoE", "parse"]

Array = npt.NDArray[np.float64]

_found: WeakKeyDictionary[Llama, list[Array]] = WeakKeyDictionary()  # ratios of the prompt that was read last


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
        check(self, order=Choice(("static", "outlier")))

    @property
    def whole_prompt(self) -> bool:  # type: ignore[override]
        return self.order == "outlier"

    def refusal(self, llm: Llama) -> str | None:
        if self.order == "outlier" and engine.is_recurrent(llm):
            return "it has a recurrent state, which cannot go back to before the prompt's last token; use ms-poe"
        if self.order == "outlier" and engine.slides(llm):
            return "it has sliding-window layers, where outliers among all keys are not defined; use ms-poe"
        if reason := refusal(llm):
            return reason
        with llm._pcd_set_to(None):
            try:
                HeadRatios(llm, self._static(llm)).close()
            except (UnsupportedError, InputError) as error:
                return str(error)
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
        ratios = self._static(llm)
        if self.order == "outlier":
            ratios = _found.get(llm, ratios)  # of the prompt that is in the cache, if one is
        heads = HeadRatios(llm, ratios)
        session.on_finish(heads.close)

        def read(part: Sequence[int]) -> int:
            """Evaluate the whole prompt to find the order, then drop its last token, which is evaluated again."""
            heads.find = self.by_outliers
            llm.eval(tokens)
            heads.find = None
            heads.check()
            _found[llm] = heads.ratios
            engine.rewind(llm, len(part), 0)
            return len(part)

        def change(t: int, rows: Rows2D) -> Rows2D:
            heads.check()
            return rows

        return Stream(session, session.start(tokens, kind=self, read=read if self.order == "outlier" else None), change)

    def by_outliers(self, layer: int, queries: Array, keys: Array) -> Array:
        """The ratios of a layer's heads in the order of outliers.

        Args:
            queries: float64[n_tokens, n_heads, d] of a prompt, before rotation.
            keys: float64[n_tokens, n_heads_kv, d], n_heads a multiple of n_heads_kv.
        """
        n_heads, d = queries.shape[1:]
        scores = np.einsum("hd,nhd->hn", queries[-1], keys.repeat(n_heads // keys.shape[1], axis=1)) / math.sqrt(d)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        outliers = weights > 3 * weights.mean(axis=1, keepdims=True)
        return self._ratios(n_heads)[np.argsort(-outliers.sum(axis=1), kind="stable")]

    def _ratios(self, n_heads: int) -> Array:
        return self.min_ratio + (self.max_ratio - self.min_ratio) * np.arange(n_heads) / max(n_heads, 1)

    def _static(self, llm: Llama) -> list[Array]:
        """The ratios of all layers' heads, the first head of each the largest."""
        counts = head_counts(llm)
        if self.first_layer >= len(counts):
            raise InputError(
                f"first_layer is {self.first_layer}, allowed: 0 to {len(counts) - 1}, for this model has {len(counts)} layers"
            )
        return [np.ones(n) if il < self.first_layer else self._ratios(n)[::-1] for il, n in enumerate(counts)]


def parse(words: Sequence[str], order: str = "static") -> MsPoE:
    """From the words behind the name: ms-poe:max_ratio=1.6:first_layer=0."""
    return values_of(functools.partial(MsPoE, order=order), words)
