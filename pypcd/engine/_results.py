"""What PCD says of a context: the logits behind a contrast, and counts."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from pypcd.errors import rename
from pypcd.settings.config import PCDConfig, typed

__all__ = ["SENTENCES", "Change", "PCDAnswer", "PCDLogits", "PCDStats"]


@dataclasses.dataclass(frozen=True)
class PCDLogits:
    """The logits behind one contrasted distribution, each float32[n_vocab].

    Attributes:
        standard: L.
        local: L*, the twin's; None if it could not change the result and was not evaluated.
        contrasted: L~ (Eq. 6), -inf outside the plausible tokens; L where a floor leaves the token plain.
        beta: the strength of this contrast, PCDConfig.beta; None if nothing was contrasted, since only one token is plausible, or a floor
            (min_context, min_entropy, min_first_entropy) leaves it plain.
    """

    standard: npt.NDArray[np.float32]
    local: npt.NDArray[np.float32] | None
    contrasted: npt.NDArray[np.float32]
    beta: float | None = None

    def copy(self) -> PCDLogits:
        local = None if self.local is None else self.local.copy()
        return PCDLogits(self.standard.copy(), local, self.contrasted.copy(), self.beta)


@dataclasses.dataclass(frozen=True)
class Change:
    """A token of an answer that plain decoding would not have found most probable.

    Attributes:
        index: which token of the answer, from 0.
        token: its id.
        plain: the id of the model's own most probable token there.
    """

    index: int
    token: int
    plain: int


# what PCD did to an answer; llama-server fills them in too (pypcd/server/__init__.py)
SENTENCES = {
    "off": "PCD off",
    "changed": "PCD ({setting}) changed {n_changed} of {n_tokens} tokens",
    "short": "PCD ({setting}) left this answer alone: the text has fewer than {min_context} tokens",
    "sure": "PCD ({setting}) left this answer alone: the model was sure",
}


@dataclasses.dataclass(frozen=True)
class PCDAnswer:
    """What PCD did to an answer; as text, a sentence.

    Attributes:
        setting: what was in force; None: off.
        n_tokens: tokens of the answer, its end included.
        n_contrasted: those for which more than one token was plausible, and which no floor left plain.
        changes: those of them that differ from the model's own most probable one because of the contrast: with a temperature, those where
            the most probable token is another one with the contrast.
        n_prompt: tokens before the answer.
        n_skipped: tokens of the answer whose twin (second evaluation) was not needed, and left out.
    """

    setting: PCDConfig | None = None
    n_tokens: int = 0
    n_contrasted: int = 0
    changes: tuple[Change, ...] = ()
    n_prompt: int = 0
    n_skipped: int = 0

    @property
    def n_changed(self) -> int:
        return len(self.changes)

    def __str__(self) -> str:
        if self.setting is None:
            return SENTENCES["off"]
        n_last = (
            1 if self.setting.min_first_entropy else self.n_tokens
        )  # that floor leaves an answer plain that begins too early
        is_short = self.n_prompt + n_last <= self.setting.min_context
        return SENTENCES["changed" if self.n_contrasted else "short" if is_short else "sure"].format(
            setting=typed(self.setting),
            n_changed=self.n_changed,
            n_tokens=self.n_tokens,
            min_context=self.setting.min_context,
        )

    def as_dict(self) -> dict[str, str | int]:
        """The sentence, the setting and the counts, as llama-server's timings have them (docs/serve.md)."""
        return {
            "pcd_answer": str(self),
            "pcd_setting": typed(self.setting),
            "pcd_contrasted": self.n_contrasted,
            "pcd_skipped": self.n_skipped,
            "pcd_changed": self.n_changed,
        }

    def with_token(self, token: int, rows: PCDLogits | None) -> PCDAnswer:
        """The same with one more token.

        Args:
            rows: the logits that it was sampled from; None: they were evaluated without PCD.
        """
        more = dataclasses.replace(
            self,
            n_tokens=self.n_tokens + 1,
            n_skipped=self.n_skipped + (self.setting is not None and (rows is None or rows.local is None)),
        )
        if rows is None or rows.beta is None:
            return more
        plain, changes = int(rows.standard.argmax()), self.changes
        if plain not in (token, int(rows.contrasted.argmax())):
            changes = (*changes, Change(self.n_tokens, token, plain))
        return dataclasses.replace(more, n_contrasted=self.n_contrasted + 1, changes=changes)


@dataclasses.dataclass(frozen=True)
class PCDStats:
    """What PCD has done in a context so far. Second keys are those that only twins see (PCDConfig.cache).

    Attributes:
        n_tokens: tokens whose logits were requested while PCD was on.
        n_twins: twins evaluated for them.
        n_skipped: twins that were not needed, since only one token was plausible, or a floor (min_context, min_entropy,
            min_first_entropy) left the token plain.
        n_derived: how many times the second keys were computed again from the first.
        n_caught_up: tokens that the second context of cache="separate" evaluated later than the token.
        second_bytes: memory of the second keys; with cache="separate" of all that the second context has.
        kv_bytes: memory of the model's own keys and values.
        n_derived_cells: of how many tokens, counted in each cache; a model with sliding-window layers has two caches.
        n_fused: batches that were evaluated together with their twins, as evaluation="fused" asks. A batch that was
            evaluated in parts counts once for each part, here and below.
        n_alternate: batches whose twins were evaluated after them, as evaluation="alternate" asks.
        n_sequential: batches whose twins were evaluated one at a time, each before its token.
        n_separate: batches evaluated with cache="separate".
        n_fallbacks: how many of all these were evaluated in another way than `evaluation` asks for.
        last_fallback: why the last of them was, in a sentence; empty if there was none.
        state_bytes: memory of the states that recurrent layers of hybrid models keep for twins.
        graph_bytes: compute memory of the graphs of twins that are evaluated after their tokens.
        row_bytes: memory of the rows L, L* and L~ of the last evaluation; freed by the next one, if that is plain.
        n_constrained: answers of generate() that were left plain since they are under a grammar, a JSON schema or a forced tool,
            and their call did not ask for PCD.
    """

    n_tokens: int = 0
    n_twins: int = 0
    n_skipped: int = 0
    n_derived: int = 0
    n_caught_up: int = 0
    second_bytes: int = 0
    kv_bytes: int = 0
    n_derived_cells: int = 0
    n_fused: int = 0
    n_alternate: int = 0
    n_sequential: int = 0
    n_separate: int = 0
    n_fallbacks: int = 0
    last_fallback: str = ""
    state_bytes: int = 0
    graph_bytes: int = 0
    row_bytes: int = 0
    n_constrained: int = 0


rename(PCDLogits, {"over_rotated": "local"})
rename(PCDStats, {"n_streams": "n_separate"})
