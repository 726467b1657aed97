"""Records, for questions whose right answer is known, the rows L and L* at each step of that answer.

Greedy decoding answers right if at each step the best token of the contrasted row is the right answer's next one. So once
the rows along the right answer are known, any formula that contrasts them is judged without decoding again (`screen`).

The right answer is read by the model token by token, all in one batch for each *view*: a setting of PCD reduced to what
makes L* (window, rotation, cache). How the answer is spelled in tokens is the model's own where greedy decoding wrote it;
else it is the tokenizer's, behind nothing, a space, or signs such as a colon that the model is likely to begin with. All
spellings together are a tree of tokens; its nodes are the steps.

What it does not know: answers in other words, and rows behind a token that no spelling has. It suits tasks with one right
text, which is found in the answer or is the whole answer; not those that give a share of the score, or take several
texts in any order.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pypcd import engine
from pypcd.config import PCDConfig
from pypcd.decode import PCD, Method, setting_of
from pypcd.errors import InputError
from pypcd.evaluation.executors import Jobs
from pypcd.evaluation.plan import BASELINE, Directory, Key, Plan
from pypcd.evaluation.progress import Progress
from pypcd.evaluation.run import Outcome, Record, Worker, evaluate, facts, run_options, tasks_of
from pypcd.evaluation.tasks.sample import Sample, Task
from pypcd.fields import names
from pypcd.method import jsd, rank
from pypcd.prompt import prompt_tokens

__all__ = ["OPEN", "RIGHT", "SCALARS", "compared", "record", "unpacked", "view_of"]

Logits = npt.NDArray[np.float32]
Path = tuple[int, ...]

RIGHT, OPEN = "right", "open"  # where a token may lead, besides to a node; what leads nowhere is wrong
SCALARS = ("lse", "entropy", "lse_s", "entropy_s", "top_s", "jsd", "rank", "rank_back")  # see compared()

_N_LEADS, _LEAD = 8, 0.05  # signs among so many best first tokens, with so much of the best one's probability, may lead
_PART = 32  # tokens of a batch: their twins take cells of the context too


def view_of(config: PCDConfig) -> PCDConfig:
    """The view of a setting: only what makes L*."""
    return PCDConfig(**{name: getattr(config, name) for name in names("twin")})


def record(
    plan: Plan,
    directory: Directory,
    *,
    k: int = 64,
    jobs: Jobs = 1,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Record what a directory does not have yet; like evaluate(), it goes on after a stop.

    Greedy decoding's record is that of an evaluation, with the tree and its rows of L; a view's record has its rows of L and
    L*, for the same tokens. (Its L is that of greedy decoding but for rounding.)

    Args:
        plan: its methods are settings of PCD, which are reduced to their views.
        k: how many tokens of each row are kept, the most probable ones of L.

    Raises:
        ValueError: a method is no PCD setting, or a task has no single right text; and as evaluate().
    """
    for task in tasks_of(plan).values():
        if not task.one_text:
            raise InputError(
                f"task is {task.name!r}, whose answers (scored by {task.metric}) have no single right text; allowed: tasks "
                "with one right text, such as kv and niah-multikey-2; judge this one by pypcd eval"
            )
    settings = [setting_of(name) for name in plan.methods]
    views = [PCD(view_of(setting)).name for setting in settings if setting is not None]
    plan = dataclasses.replace(plan, methods=(BASELINE, *views))
    options = run_options(plan, options or {}, jobs)
    known = facts(plan, options, jobs=jobs, directory=directory)
    return evaluate(
        plan,
        directory,
        jobs=jobs,
        options=options,
        model_facts={**known, "rows": {"k": k}},
        progress=progress,
        worker=functools.partial(_Recorder, k=k),
    )


class _Recorder(Worker):
    """Answers each question greedily, makes its tree, and reads the rows of each view."""

    def __init__(self, plan: Plan, options: Mapping[str, Any], *, k: int) -> None:
        super().__init__(plan, options)
        self._k = min(k, self.llm.n_vocab())
        self._known: tuple[Any, Record, _Tree] | None = None  # of the present question

    def _answered(self, key: Key, sample: Sample, method: Method) -> Record:
        started = time.perf_counter()
        if self._known is None or self._known[0] != key[:3]:
            self._known = None
            answer, plain = self._scored(key, sample, self._methods[BASELINE])
            self._known = key[:3], plain, self._tree(_Gold(self._tasks[key[0]], sample), sample, answer.tokens)
        _, plain, tree = self._known
        made = {**plain, **tree.record()} if key[3] == BASELINE else self._view(tree, method.rows.pcd)
        return {**made, "seconds": round(time.perf_counter() - started, 4)}

    def _tree(self, gold: _Gold, sample: Sample, own: Sequence[int]) -> _Tree:
        prompt = prompt_tokens(self.llm, sample.prompt, chat=self.plan.chat)
        tree, text, is_end = _Tree(prompt), self.vocabulary.text, self.session.is_end
        with self._rows_of(prompt, None) as rows:
            ((row, _),) = rows(())
            tree.nodes[()] = _Node(0, row, self._k)
            for path in self._spellings(gold, sample, tree, own):
                for i, (row, _) in enumerate(rows(path)):
                    if path[:i] not in tree.nodes:
                        tree.nodes[path[:i]] = _Node(len(tree.nodes), row, self._k)
                    if i < len(path) and path[i] not in tree.nodes[path[:i]].ids:
                        break  # no formula gets behind a token that is not among the k most probable
        for path, node in tree.nodes.items():
            before = b"".join(map(text, path))
            for token in node.ids.tolist():
                child = tree.nodes.get((*path, token))
                what = child.index if child else gold.judge(before, None if is_end(token) else text(token))
                if what is not None:
                    tree.edges.append((node.index, token, what))
            tree.words.append(re.search(rb"[0-9A-Za-z\x80-\xff]", text(int(node.ids[0]))) is not None)
        return tree

    def _spellings(self, gold: _Gold, sample: Sample, tree: _Tree, own: Sequence[int]) -> Iterator[Path]:
        """The ways to write the right answer, in tokens."""
        written = [self.vocabulary.text(token) for token in own]
        yield tuple(own[: gold.n_read(written)])
        root = tree.nodes[()]
        likely = root.ids[:_N_LEADS][root.logits[:_N_LEADS] >= root.logits[0] + np.log(_LEAD)]
        begun = [b"".join(written), *map(self.vocabulary.text, likely.tolist())]
        for text in gold.texts(begun):
            path = self._tokens(sample, tree.prompt, text.decode())
            parts = [self.vocabulary.text(token) for token in path]
            if b"".join(parts) == text:
                yield path[: gold.n_read(parts)]

    def _tokens(self, sample: Sample, prompt: Sequence[int], text: str) -> Path:
        """The tokens of a text behind a prompt, whose own tokens stay as they are."""
        longer = sample.prompt.replace(answer_prefix=sample.prompt.answer_prefix + text)
        together = prompt_tokens(self.llm, longer, chat=self.plan.chat)
        if together[: len(prompt)] == list(prompt):
            return tuple(together[len(prompt) :])
        return tuple(self.llm.tokenize(text.encode(), add_bos=False, special=False))

    def _view(self, tree: _Tree, setting: PCDConfig | None) -> Record:
        found: dict[int, tuple[Logits, Logits, dict[str, float]]] = {}
        with self._rows_of(tree.prompt, setting) as rows:
            for path in tree.leaves():
                for i, (first, second) in enumerate(rows(path)):
                    node = tree.nodes[path[:i]]
                    if node.index not in found:
                        assert second is not None  # a view's contrast needs each twin
                        found[node.index] = first[node.ids], second[node.ids], compared(first, second)
        values = [found[i] for i in range(len(found))]
        return {
            "logits": _packed(np.stack([first for first, _, _ in values])),
            "logits_s": _packed(np.stack([second for _, second, _ in values])),
            **{name: [scalars[name] for _, _, scalars in values] for name in SCALARS},
        }

    @contextlib.contextmanager
    def _rows_of(self, prompt: Sequence[int], setting: PCDConfig | None) -> Iterator[Callable[[Path], Iterator[_Rows]]]:
        """A function that gives the rows L and (with a setting) L* behind a prompt and behind each token of a path.

        As real decoding computes them: a single token is multiplied by other kernels than several, which round otherwise.
        So plain rows are made one token at a time; with a setting there are two rows or more in any case.
        """
        session = self.session

        def row(i: int) -> _Rows:
            if setting is None:
                return engine.row(self.llm, i), None
            rows = self.llm.pcd_logits(i)
            return rows.standard, rows.local

        def rows(path: Path) -> Iterator[_Rows]:
            session.start(prompt, setting)
            yield row(0)
            n_part = 1 if setting is None else _PART
            for begin in range(0, len(path), n_part):
                part = path[begin : begin + n_part]
                session.write(part)
                yield from map(row, range(len(part)))

        try:
            yield rows
        finally:
            session.finish()


class _Node:
    """A step of the tree: the k most probable tokens of L, the lower id first where logits are equal."""

    def __init__(self, index: int, row: Logits, k: int) -> None:
        self.index = index
        best = np.flatnonzero(row >= np.partition(row, -k)[-k])
        self.ids = best[np.argsort(-row[best], kind="stable")[:k]]
        self.logits = row[self.ids]
        _, self.lse, _ = _softmax(_masked(row))


@dataclasses.dataclass
class _Tree:
    """The spellings of a question's right answer.

    Attributes:
        nodes: by the tokens that lead there.
        edges: (node, token, a node, "right" or "open"). A token that has none leads to a wrong answer.
        words: of each node, whether the best token of L has a letter or a digit.
    """

    prompt: list[int]
    nodes: dict[Path, _Node] = dataclasses.field(default_factory=dict)
    edges: list[tuple[int, int, int | str]] = dataclasses.field(default_factory=list)
    words: list[bool] = dataclasses.field(default_factory=list)

    def leaves(self) -> list[Path]:
        inner = {path[:i] for path in self.nodes for i in range(len(path))}
        return [path for path in self.nodes if path not in inner]

    def record(self) -> Record:
        nodes = list(self.nodes.values())
        return {
            "steps": [len(path) for path in self.nodes],
            "edges": self.edges,
            "ids": _packed(np.stack([node.ids for node in nodes]).astype("<i4")),
            "logits": _packed(np.stack([node.logits for node in nodes])),
            "lse": [node.lse for node in nodes],
            "words": self.words,
            "seen": _packed(np.stack([np.isin(node.ids, self.prompt) for node in nodes]).astype("u1")),
        }


class _Gold:
    """The right answer of a question, and what can be said of a text while it is written.

    Attributes:
        text: the right answer.
        stop: the text that ends an answer, besides the model's own end. Empty if only that does: then an answer counts as
            right if it still is with the next token.
    """

    def __init__(self, task: Task, sample: Sample) -> None:
        self._task, self._sample = task, sample
        self.text = sample.answers[0].strip().encode()
        self.stop: bytes = task.stop.encode()

    def is_right(self, text: bytes) -> bool:
        return self._task.score(text.decode("utf-8", "replace"), self._sample) == 1

    def is_over(self, text: bytes) -> bool:
        """Whether an answer is right, and has ended if a text ends it."""
        return self.stop in text.lstrip() and self.is_right(text)

    def n_read(self, written: Sequence[bytes]) -> int:
        """How many tokens of an answer have to be read, so that the row behind them tells whether it comes right; 0 if it
        does not."""
        texts = [b"".join(written[:n]) for n in range(len(written) + 1)]
        for n, text in enumerate(texts):
            if self.is_over(text):
                return n - bool(self.stop)
        return len(written) * self.is_right(texts[-1])

    def texts(self, begun: Iterable[bytes]) -> Iterator[bytes]:
        """The right answer, and the same with its end, behind the signs that other answers begin with, or a space, or
        nothing."""
        leads = [b" ", b""]
        for lead in map(_signs, begun):
            at = lead.find(self.text[:1])  # where the right answer itself begins with a sign
            lead = lead if at < 0 else lead[:at]
            leads += [lead, lead.rstrip() + b" "]
        for text in dict.fromkeys(lead + self.text + end for lead in leads for end in (b"", self.stop)):
            if self.is_right(text):
                yield text

    def judge(self, before: bytes, added: bytes | None) -> str | None:
        """Where a token leads that no spelling has: to the right answer, to another spelling of it ("open"), or (None) to
        a wrong one. added: the token's text; None if it ends the answer."""
        if added is None:
            return RIGHT if self.is_right(before) else None
        after = before + added
        if self.is_over(after):
            return RIGHT
        return OPEN if added and (self.is_right(after) or self._may_become(after)) else None

    def _may_become(self, text: bytes) -> bool:
        whole = self.text + self.stop
        return any(whole.startswith(text[n:]) for n in range(len(_signs(text)) + 1))


_Rows = tuple[Logits, "Logits | None"]


def _signs(text: bytes) -> bytes:
    """What a text begins with before its first letter or digit."""
    return re.match(rb"[^0-9A-Za-z\x80-\xff]*", text).group()  # type: ignore[union-attr]  # matches nothing too


# -- rows ----------------------------------------------------------------------------------------------------------------


def compared(first: npt.ArrayLike, second: npt.ArrayLike) -> dict[str, float]:
    """What there is to know of two rows as a whole, besides their logits (SCALARS).

    Returns:
        lse: the logarithm of the sum of exp(L). entropy: that of softmax L, in bits. lse_s, entropy_s: the same of L*.
        top_s: the highest probability in softmax L*. jsd: the Jensen-Shannon divergence of the two softmax rows, in bits.
        rank: the rank in L* of L's best token. rank_back: the rank in L of L*'s best token.
    """
    a, b = _masked(first), _masked(second)
    (_, lse, entropy), (q, lse_s, entropy_s) = _softmax(a), _softmax(b)
    return {
        "lse": lse,
        "entropy": entropy,
        "lse_s": lse_s,
        "entropy_s": entropy_s,
        "top_s": round(float(q.max()), 9),
        "jsd": round(jsd(a, b), 9),
        "rank": rank(b, int(a.argmax())),
        "rank_back": rank(a, int(b.argmax())),
    }


Row = npt.NDArray[np.float64]


def _masked(row: npt.ArrayLike) -> Row:
    """A row with -inf for all that is no logit (see contrast)."""
    values = np.asarray(row, np.float64)
    return np.where(np.abs(values) < 1e30, values, -np.inf)


def _softmax(row: Row) -> tuple[Row, float, float]:
    """The probabilities of a row, the logarithm of the sum of its exp, and its entropy in bits."""
    shifted = row - row.max()
    p = np.exp(shifted)
    total = float(p.sum())
    p /= total
    entropy = (np.log(total) - float(p @ np.maximum(shifted, -1e3))) / np.log(2)  # exp(-1000) is 0
    return p, round(float(row.max() + np.log(total)), 9), round(float(entropy), 9)


def _packed(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def unpacked(text: str, kind: Literal["i4", "f4", "u1"], n: int) -> npt.NDArray[Any]:
    """A record's integers, floats or truth values (u1), [n, k]."""
    return np.frombuffer(base64.b64decode(text), np.dtype(kind).newbyteorder("<")).reshape(n, -1)
