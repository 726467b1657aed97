"""Judges formulas on recorded rows, thousands in a minute, and checks its judgement against real decoding.

    screen = Screen(record(plan, directory).records)            # decodes only what the directory does not have yet
    for scored in score(screen, map(Formula.parse, texts)): ...

A formula's verdict on a question: it follows its own best tokens through the tree of right answers. It is right if it
comes to an end of the tree. If it leaves the tree with a token that may begin another spelling of the right answer, the
question counts as wrong, but as open too: the true share of right answers may be higher by those. What it does not know:
answers that come right in other words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pypcd.decode import PCD
from pypcd.errors import InputError, PCDError
from pypcd.evaluation.plan import BASELINE, Directory, Key, Plan
from pypcd.evaluation.run import Record, evaluate
from pypcd.evaluation.stats import Paired, paired
from pypcd.lab.formula import Formula, Rows
from pypcd.lab.recorded import OPEN, RIGHT, SCALARS, unpacked

__all__ = ["Agreement", "Scored", "Screen", "agreement", "score"]

Cell = tuple[str, int]  # task, length
Question = tuple[str, int, int]  # task, length, index

_WRONG, _RIGHT, _OPEN = -1, -2, -3  # what follows a token, besides a node


@dataclasses.dataclass(frozen=True)
class Scored:
    """A formula against plain decoding, on the same questions.

    Attributes:
        cells: by task and length and, under (None, None), for all together.
        n_open: the questions that count as wrong but may be right in another spelling, the same.
    """

    formula: Formula
    cells: Mapping[tuple[str | None, int | None], Paired]
    n_open: Mapping[tuple[str | None, int | None], int]


class Screen:
    """Recorded rows, ready for any number of formulas.

    Args:
        records: as record() returns them, or a run's directory holds them.

    Attributes:
        questions: those recorded with plain decoding, in the order of all results.
        k: how many tokens of each row are known.

    Raises:
        ValueError: there is none.
        PCDError: a question could not be recorded.
    """

    def __init__(self, records: Mapping[Key, Record]) -> None:
        self._records = records
        self.questions: list[Question] = sorted(key[:3] for key in records if key[3] == BASELINE)
        if not self.questions:
            raise InputError("there are no records of plain decoding to screen with; record some first")
        made = [_Tree(self._record(question, BASELINE)) for question in self.questions]
        self.k = min(tree.ids.shape[1] for tree in made)
        self._first = np.cumsum([0, *(len(tree.ids) for tree in made)])  # node, of each question's tree
        self._ids = np.concatenate([tree.ids[:, : self.k] for tree in made])
        self._next = np.concatenate(
            [
                np.where(tree.next >= 0, tree.next + first, tree.next)[:, : self.k]
                for tree, first in zip(made, self._first)
            ]
        )
        self._step, self._context = (np.concatenate([getattr(t, name) for t in made]) for name in ("step", "context"))
        l, self._seen = (np.concatenate([getattr(t, name)[:, : self.k] for t in made]) for name in ("l", "seen"))
        self._trees = made
        self._views: dict[str, tuple[Rows, npt.NDArray[Any]]] = {
            BASELINE: (Rows(self._ids, l, l, self._seen, {}), self._next)
        }

    @property
    def cells(self) -> list[Cell]:
        return list(dict.fromkeys(question[:2] for question in self.questions))

    def _view(self, view: str) -> tuple[Rows, npt.NDArray[Any]]:
        """The rows of a view, by its name as a method, and what follows each of their tokens."""
        if view not in self._views:
            found = [self._record(question, view) for question in self.questions]
            scalars = {name: np.concatenate([np.asarray(r[name], float) for r in found]) for name in SCALARS}
            l, s = (
                _log_probabilities(
                    np.concatenate([unpacked(r[name], "f4", len(r["lse"]))[:, : self.k] for r in found]), scalars[lse]
                )
                for name, lse in (("logits", "lse"), ("logits_s", "lse_s"))
            )
            order = np.lexsort((self._ids, -l), axis=1)  # its own L may have near tokens in another order
            arrays = (self._ids, l, s, self._seen, self._next)
            ids, l, s, seen, after = (np.take_along_axis(array, order, 1) for array in arrays)
            names = ("entropy", "entropy_s", "top_s", "jsd", "rank", "rank_back")
            values = {name: scalars[name] for name in names}
            sizes = np.diff(self._first)
            values["first"] = np.repeat(scalars["entropy"][self._first[:-1]], sizes)
            values |= {"top": np.exp(l[:, 0]), "step": self._step, "context": self._context}
            values["margin"] = l[:, 0] - l[:, 1]
            parts = zip(self._trees, np.split(scalars["entropy"], self._first[1:-1]))
            values["first_word"], values["most"] = np.concatenate([t.of_words(part) for t, part in parts], axis=1)
            self._views[view] = Rows(ids, l, s, seen, values), after
        return self._views[view]

    def follow(self, formula: Formula) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Of each question, whether the formula answers right, and whether it leaves the tree to another spelling.

        Raises:
            ValueError: its view has not been recorded, or its gamma is larger than k.
        """
        if formula.view is not None and formula.gamma > self.k:
            raise InputError(f"gamma is {formula.gamma}; allowed: up to {self.k}, the tokens recorded of each row")
        rows, follows = self._view(BASELINE if formula.view is None else PCD(formula.view).name)
        after = np.take_along_axis(follows, formula.choose(rows)[:, None], 1)[:, 0]
        at = self._first[:-1].copy()
        while (going := at >= 0).any():
            at[going] = after[at[going]]
        return at == _RIGHT, at == _OPEN

    def entropies(self, view: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """In bits, those of softmax L at each answer's first token, and at all recorded steps."""
        rows, _ = self._view(view)
        return rows.values["entropy"][self._first[:-1]], rows.values["entropy"]

    def _record(self, question: Question, method: str) -> Record:
        where = "question {2} of {0} at {1} tokens".format(*question)
        record = self._records.get((*question, method))
        if record is None:
            raise InputError(f"there are no rows of {method} for {where}; record that view first")
        if record.get("error"):
            raise PCDError(f"{method} has no rows for {where}: {record['error']}")
        return record


class _Tree:
    """A question's recorded tree, with plain decoding's rows."""

    def __init__(self, record: Record) -> None:
        n = len(record["steps"])
        self.ids = unpacked(record["ids"], "i4", n)
        logits = unpacked(record["logits"], "f4", n)
        self.l = _log_probabilities(logits, np.asarray(record["lse"]))
        self.step = np.asarray(record["steps"], float)
        self.context = self.step + record["n_prompt"]
        self.next = np.full(self.ids.shape, _WRONG)
        self._before = np.full(n, -1)  # the node that leads to each
        for node, token, what in record["edges"]:
            self.next[node, self.ids[node] == token] = {RIGHT: _RIGHT, OPEN: _OPEN}.get(what, what)
            if what not in (RIGHT, OPEN):
                self._before[what] = node
        self.seen = unpacked(record["seen"], "u1", n).astype(bool)
        self._words = record["words"]

    def of_words(self, entropy: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """first_word and most (see formula.NAMES) of each node, float64[2, n]."""
        found = np.zeros((2, len(entropy)))
        has_word = np.array(self._words)
        for node, before in enumerate(self._before):  # a node comes after the one that leads to it
            first, most, had = (*found[:, before], has_word[before]) if before >= 0 else (0.0, 0.0, False)
            now = entropy[node] if self._words[node] else 0.0
            found[:, node] = first if had else now, max(most, now)
            has_word[node] |= had
        return found


def _log_probabilities(logits: npt.NDArray[Any], lse: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    values = logits.astype(float)
    return np.where(np.abs(values) < 1e30, values - lse[:, None], -np.inf)


def score(screen: Screen, formulas: Iterable[Formula]) -> list[Scored]:
    """Judge formulas on the same questions, each against plain decoding judged in the same way.

    Raises:
        ValueError: a view has not been recorded, or gamma is larger than the number of recorded tokens.
        PCDError: a question could not be recorded.
    """
    masks: dict[tuple[str | None, int | None], Any] = {(None, None): np.full(len(screen.questions), True)}
    for cell in screen.cells:
        masks[cell] = np.array([question[:2] == cell for question in screen.questions])
    plain, _ = screen.follow(Formula(None))
    results = []
    for formula in formulas:
        right, is_open = screen.follow(formula)
        cells = {cell: paired(right[mask], plain[mask]) for cell, mask in masks.items()}
        results.append(Scored(formula, cells, {cell: int(is_open[masks[cell]].sum()) for cell in cells}))
    return results


@dataclasses.dataclass(frozen=True)
class Agreement:
    """A formula's verdicts beside those of real decoding.

    Attributes:
        n: questions.
        n_same: on which both say the same.
        screened_only: the questions that only the formula finds right.
        decoded_only: the questions that only decoding finds right.
        n_open: those of decoded_only where the formula left the tree to another spelling.
    """

    formula: Formula
    n: int
    n_same: int
    screened_only: tuple[Question, ...]
    decoded_only: tuple[Question, ...]
    n_open: int


def agreement(
    screen: Screen,
    formulas: Sequence[Formula],
    plan: Plan,
    directory: Directory,
    **how: Any,
) -> list[Agreement]:
    """Decode by the formulas that the engine has, and compare.

    Args:
        plan: that of the records, of as many questions as are to be decoded; its methods are ignored.
        directory: for the answers, another one than the records'.
        how: further arguments of evaluate().

    Raises:
        ValueError: the engine has no setting for a formula; and as evaluate().
        PCDError: a question could not be answered.
    """
    methods = []
    for formula in formulas:
        if formula.view is not None and formula.config is None:
            raise InputError(f"{formula.name} is no setting of the engine, so it cannot be decoded; leave it out here")
        methods.append(BASELINE if formula.config is None else PCD(formula.config).name)
    outcome = evaluate(dataclasses.replace(plan, methods=tuple(methods)), directory, **how)
    results = []
    for formula, method in zip(formulas, methods):
        right, is_open = screen.follow(formula)
        same, only, missed, n_open, n = 0, [], [], 0, 0
        for question, screened, may in zip(screen.questions, right, is_open):
            record = outcome.records.get((*question, method))
            if record is None:
                continue
            if record.get("error"):
                raise PCDError(f"{method} did not answer {question}: {record['error']}")
            decoded = record["score"] == 1
            n += 1
            same += bool(decoded == screened)
            if screened and not decoded:
                only.append(question)
            if decoded and not screened:
                missed.append(question)
                n_open += bool(may)
        results.append(Agreement(formula, n, same, tuple(only), tuple(missed), n_open))
    return results
