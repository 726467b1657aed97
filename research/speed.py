"""How long an evaluation will take on this machine, from a few answers that are timed first.

A prompt is evaluated once for all methods; then each method writes its answer, step by step; and the method control first
answers other questions, once in each cell (a task at a length). The time of a prompt's token and of a step grow with the
length of the prompt, since attention goes over all of it: so they are timed at the shortest and the longest length, and
between these the time lies on a straight line. Knows nothing of terminals.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from pypcd.decode import Control, Session, parse
from pypcd.evaluation.executors import Jobs, executor_of
from pypcd.evaluation.plan import BASELINE, Key, Plan
from pypcd.evaluation.run import tasks_of
from pypcd.evaluation.tasks import GROUPS
from pypcd.evaluation.tasks.everyday import kind_of
from pypcd.evaluation.tokenizer import ModelTokenizer
from pypcd.llama import Llama

__all__ = ["Estimate", "Speed", "Timing", "estimate", "time_answers"]


@dataclasses.dataclass(frozen=True)
class Timing:
    """One question, timed.

    Attributes:
        n_prompt: tokens of its prompt.
        read: seconds to evaluate the prompt.
        answers: by method: tokens of its answer, and the seconds it took, without the prompt.
    """

    task: str
    length: int
    n_prompt: int
    read: float
    answers: Mapping[str, tuple[int, float]]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The time that answers will take.

    Attributes:
        n_questions, n_answers: how many are to be made.
        prompts, answers: seconds to evaluate prompts, and to write answers.
        control: seconds of the other questions that the method control answers first.
    """

    n_questions: int = 0
    n_answers: int = 0
    prompts: float = 0.0
    answers: float = 0.0
    control: float = 0.0

    @property
    def seconds(self) -> float:
        return self.prompts + self.answers + self.control

    def __add__(self, other: Estimate) -> Estimate:
        ours, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Estimate(*(a + b for a, b in zip(ours, theirs)))


class Speed:
    """What timings say about other lengths and tasks."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        self._timings = timings
        self._at: dict[int, list[Timing]] = {}
        for timing in timings:
            self._at.setdefault(timing.length, []).append(timing)

    def n_prompt(self, task: str, length: int) -> float:
        """Tokens of a prompt: many tasks fill the length, but a short prompt of everyday questions need not."""
        found = [t.n_prompt for t in self._timings if (t.task, t.length) == (task, length)]
        return statistics.fmean(found) if found else float(length)

    def read(self, n_prompt: float) -> float:
        """Seconds to evaluate a prompt."""
        each = {
            statistics.fmean(t.n_prompt for t in found): sum(t.read for t in found) / sum(t.n_prompt for t in found)
            for found in self._at.values()
        }
        return n_prompt * _between(n_prompt, each)

    def step(self, method: str, n_prompt: float) -> float:
        """Seconds for a token of an answer; 0 for a method that the model cannot run."""
        each = {}
        for found in self._at.values():
            answers = [t.answers[method] for t in found if method in t.answers]
            if answers:
                n_tokens = sum(max(n, 1) for n, _ in answers)
                each[statistics.fmean(t.n_prompt for t in found)] = sum(s for _, s in answers) / n_tokens
        return _between(n_prompt, each) if each else 0.0

    def ratio(self, method: str) -> float | None:
        """The time of prompt and answer as a multiple of greedy's, over all timings; None for a method that the model cannot run."""
        asked = [t for t in self._timings if method in t.answers]
        plain = sum(t.read + t.answers[BASELINE][1] for t in asked)
        return sum(t.read + t.answers[method][1] for t in asked) / plain if plain else None

    def n_tokens(self, task: str, method: str, most: int) -> float:
        """Tokens of an answer: as in the timings of this task, or else of all everyday questions; `most` if there are none."""
        kind, timed = kind_of(task), [t for t in self._timings if method in t.answers]
        same = [t for t in timed if (kind_of(t.task) or t.task) == (kind or task)]
        found = same or [t for t in timed if kind and kind_of(t.task)]
        return min(statistics.fmean(max(t.answers[method][0], 1) for t in found), most) if found else float(most)


def _between(x: float, known: Mapping[float, float]) -> float:
    xs = sorted(known)
    return float(np.interp(x, xs, [known[at] for at in xs]))


def estimate(plan: Plan, missing: Iterable[Key], speed: Speed, jobs: Jobs = 1) -> Estimate:
    """The time that a plan's missing answers will take.

    Args:
        jobs: as in evaluate(); each process computes what the control needs for itself.
    """
    missing, n = list(missing), executor_of(jobs).n_workers()
    most = {name: plan.max_tokens or task.max_tokens for name, task in tasks_of(plan).items()}
    pooled = {name for name in plan.methods if isinstance(parse(name).rows, Control)}

    def answer(task: str, length: int, method: str) -> float:
        return speed.step(method, speed.n_prompt(task, length)) * speed.n_tokens(task, method, most[task])

    questions = {key[:3] for key in missing}
    prompts = sum(speed.read(speed.n_prompt(task, length)) for task, length, _ in questions)
    answers = sum(answer(task, length, method) for task, length, _, method in missing)
    control = 0.0
    for task, length in {key[:2] for key in missing if key[3] in pooled}:
        once = speed.read(speed.n_prompt(task, length))
        control += plan.n_pool * (once + answer(task, length, BASELINE)) + once  # and its own prompt again
    return Estimate(len(questions), len(missing), prompts / n, answers / n, control)


def time_answers(llm: Llama, plans: Sequence[Plan]) -> Iterator[Timing]:
    """Time a question of each task at the shortest length, and one question at the longest; the seconds are of this machine
    as it is now."""
    lengths = [length for plan in plans for length in plan.lengths]
    session = Session(llm)
    is_first = True
    for length in dict.fromkeys((min(lengths), max(lengths))):
        asked = [(plan, name) for plan in plans if length in plan.lengths for name in plan.tasks]
        if length > min(lengths):
            asked = asked[:1]
        else:
            asked = [(plan, name) for plan, name in asked if name not in GROUPS["everyday-behind"]] or asked[:1]
        for plan, name in asked:
            if is_first:  # what is prepared once, such as the first pages of the weights, counts for nothing
                _timed(session, plan, name, length)
            is_first = False
            yield _timed(session, plan, name, length)


def _timed(session: Session, plan: Plan, name: str, length: int) -> Timing:
    llm, task = session.llm, tasks_of(plan)[name]
    sample = task.samples(1, length, ModelTokenizer(llm, chat=plan.chat), plan.seed)[0]

    def seconds(method: str, times: int = 1) -> list[tuple[int, int, float]]:
        made = parse(method).with_pool((sample.prompt,))
        found = []
        for _ in range(times):
            answer = made.generate(
                session, sample.prompt, max_tokens=plan.max_tokens or task.max_tokens, stop=task.stop, chat=plan.chat
            )
            found.append((answer.n_prompt, len(answer.tokens), answer.seconds))
        return found

    session.clear()
    (n_prompt, _, first), (_, n_tokens, again) = seconds(BASELINE, 2)
    read = max(first - again, 0.0)
    answers = {BASELINE: (n_tokens, again)}
    for method in plan.methods:
        made = parse(method).with_pool((sample.prompt,))
        if method != BASELINE and made.refusal(llm, chat=plan.chat) is None:
            if made.edit is not None:  # it leaves another prompt in the cache than it finds
                session.clear()
            _, n_tokens, taken = seconds(method, 2 if isinstance(made.rows, Control) else 1)[-1]
            answers[method] = n_tokens, max(taken - read, 0.0) if made.edit else taken
    return Timing(name, length, n_prompt, read, answers)
