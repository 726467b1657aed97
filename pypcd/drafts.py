"""How many of the tokens that a draft model proposes are evaluated, so that decoding with it is not slower than without.

A draft model guesses the tokens that come next. A step that evaluates n guesses with the present token makes up to n + 1
tokens, and takes longer than a step without: 1.1 to 6 times for 1 to 10 guesses, by model, setting and machine. Both
sides are measured while the text is written: how long a step takes by its number of tokens, and how often the guesses
are right, which shows without evaluating them. An account of time gained and lost bounds what wrong guesses may cost.

Knows token ids and seconds; nothing of models, contexts or the library.
"""

from __future__ import annotations

import collections
import itertools
import operator
import statistics
import time
from collections.abc import Hashable
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

__all__ = ["Drafts"]

Tokens = npt.NDArray[np.intc]
DraftModel = Callable[..., Tokens]

SIZES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 63)  # how many guesses one step may evaluate: few shapes of graphs

# The account, in plain steps (steps without guesses): what the guesses of one text have gained less what they have cost.
START = 2.0  # what may be lost before anything is gained
ALLOWANCE = 0.03  # what may be lost for each token
LIMIT = 8.0  # it is kept within this and minus this: what a text was like, or a disturbed step, does not count for ever
MARGIN = 1.03  # guesses are evaluated where they promise this much more speed


class StepTimes:
    """What steps cost by their number of tokens, in units of a plain step, which has one token."""

    KEPT = 5  # measurements of each size; their median counts, so that one disturbed step does not
    OLD = 64  # steps after which a measurement is forgotten: the machine or the text may have changed
    PLAIN_EVERY = 32  # steps after which a plain step has to be measured again
    SLOPE = 0.25  # of one token more, while none was measured: low, so that it is tried

    def __init__(self) -> None:
        self._seconds: dict[int, collections.deque[float]] = {}
        self._median: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._n_steps = 0

    def note(self, n_tokens: int, seconds: float) -> None:
        self._n_steps += 1
        kept = self._seconds.setdefault(n_tokens, collections.deque(maxlen=self.KEPT))
        kept.append(seconds)
        self._median[n_tokens] = statistics.median_low(kept)
        self._measured_at[n_tokens] = self._n_steps
        for n in [n for n, at in self._measured_at.items() if n > 1 and at <= self._n_steps - self.OLD]:
            del self._seconds[n], self._median[n], self._measured_at[n]

    def plain(self) -> float | None:
        """Seconds of a plain step; None until two were measured, since the first one may pay for what comes later."""
        return self._median[1] if len(self._seconds.get(1, ())) > 1 else None

    def wants_plain(self) -> bool:
        """Whether the next step should be a plain one, to be measured."""
        return self.plain() is None or self._measured_at[1] <= self._n_steps - self.PLAIN_EVERY

    def largest(self) -> int:
        """The largest step that was measured lately."""
        return max(self._median, default=1)

    def of(self, n_tokens: int) -> float:
        """What a step is expected to cost; sizes that were not measured lie on a line between their neighbours.

        A plain step must have been measured."""
        below = max(n for n in self._median if n <= n_tokens)
        above = min((n for n in self._median if n > n_tokens), default=None)
        plain, cost = self._median[1], self._median[below] / self._median[1]
        if above is not None:
            slope = (self._median[above] / plain - cost) / (above - below)
        else:
            slope = self.SLOPE if below == 1 else max(cost - 1, 0.0) / (below - 1)
        return cost + slope * (n_tokens - below)


class Hits:
    """How likely the next guesses are right, by how many in a row were right just before."""

    FORGET = 0.96  # the weight of older guesses, for each new one of the same kind
    PRIOR = 0.5
    KINDS = 5  # runs of 0, 1, 2 to 3, 4 to 7, 8 and more

    def __init__(self) -> None:
        self.run = 0  # guesses in a row that were right
        self._right = [self.PRIOR] * self.KINDS
        self._all = [1.0] * self.KINDS

    def _kind(self, run: int) -> int:
        return min(run.bit_length(), self.KINDS - 1)

    def note(self, right: bool) -> None:
        i = self._kind(self.run)
        self._right[i] = self.FORGET * self._right[i] + right
        self._all[i] = self.FORGET * self._all[i] + 1
        self.run = self.run + 1 if right else 0

    def n_tokens(self, most: int) -> list[float]:
        """How many tokens a step is expected to make, by its number of guesses, 0 to `most`."""
        share = [right / n for right, n in zip(self._right, self._all)]
        all_right = (share[self._kind(run)] for run in range(self.run, self.run + most))
        return list(itertools.accumulate(itertools.accumulate(all_right, operator.mul), initial=1.0))


class Drafts:
    """A draft model that stands before another one: it passes on as many of its guesses as pay, and asks it only then.

    Attributes:
        model: the other one.
    """

    def __init__(
        self, model: DraftModel, n_ctx: int, n_batch: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """
        Args:
            model: a llama_cpp.LlamaDraftModel: a function from the text so far to the tokens that may follow.
            n_ctx: how many tokens and twins fit in the context.
            n_batch: how many fit in one batch.
            clock: seconds.
        """
        self.model = model
        self._n_ctx, self._n_batch, self._clock = n_ctx, n_batch, clock
        self._called = False
        self._asking = 0.0  # seconds that it took to ask, the last time, and to choose
        self._begin(None)

    def _begin(self, setting: Hashable) -> None:
        """A new text, or the same one from here on under another setting."""
        self._setting = setting
        self._times, self._hits = StepTimes(), Hits()
        self._guesses: list[int] = []  # of the tokens that follow the text
        self._n_text = 0  # its tokens at the last call; 0: there was none
        self._balance = START

    # -- told by whoever evaluates ------------------------------------------------------------------------------------

    def starts_step(self, setting: Hashable) -> bool:
        """Whether the tokens that are evaluated next follow a call: a step of generate(). If not, a new text starts.

        Args:
            setting: what the cost of a step depends on; after a change it is measured anew.
        """
        called, self._called = self._called, False
        if not called or setting != self._setting:
            self._begin(setting)
        return called

    def note(self, n_tokens: int, seconds: float) -> None:
        """A step of so many tokens has taken so long."""
        plain = self._times.plain()
        if plain and n_tokens > 1:
            self._add(1 - seconds / plain)  # what it has gained is known at the next call
        self._times.note(n_tokens, seconds)

    def _add(self, steps: float) -> None:
        self._balance = min(max(self._balance + steps, -LIMIT), LIMIT)

    # -- called by generate() -----------------------------------------------------------------------------------------

    def __call__(self, input_ids: Tokens, /, **kwargs: Any) -> Tokens:
        """The tokens to evaluate together with the last one of the text."""
        self._see(input_ids)
        asked, started = self._may_ask(), self._clock()
        if asked:
            self._guesses = [int(token) for token in self.model(input_ids, **kwargs)]
            self._spend(started)
        if not self._guesses:
            self._hits.run = 0
        room = min(self._n_batch, self._n_ctx - len(input_ids) + 1) // 2 - 1  # each token may have a twin
        answered = self._clock()
        n = self._choose(min(len(self._guesses), SIZES[-1], room))
        if asked:
            self._spend(answered)
            self._asking = self._clock() - started
        self._called = True
        return np.array(self._guesses[: max(n, 0)], dtype=np.intc)

    def _see(self, input_ids: Tokens) -> None:
        """Compare the tokens since the last call with the guesses, whether these were evaluated or not."""
        new = input_ids[self._n_text :].tolist() if self._n_text else []
        for token in new[: len(self._guesses)]:
            right = token == self._guesses.pop(0)
            self._hits.note(right)
            if not right:
                self._guesses.clear()
                break
        if new:
            self._add(ALLOWANCE * len(new) + len(new) - 1)
        self._n_text = len(input_ids)

    def _may_ask(self) -> bool:
        """Whether few guesses are left, and the account has what new ones cost."""
        plain = self._times.plain()
        few = len(self._guesses) <= self._hits.run // 2  # as long as none was right, those at hand are to be seen first
        return few and self._balance >= (self._asking / plain if plain else 0.0)

    def _spend(self, started: float) -> None:
        plain = self._times.plain()
        if plain:
            self._add(-(self._clock() - started) / plain)

    def _choose(self, most: int) -> int:
        """How many guesses promise most; 0 if a step with any is not expected to pay, or might cost too much."""
        if self._times.wants_plain():
            return 0
        sizes = [n for n in SIZES if n <= min(most, 2 * self._times.largest())]
        n_tokens = self._hits.n_tokens(max(sizes, default=0))
        best, speed = 0, MARGIN
        for n in sizes:
            cost = self._times.of(1 + n)
            at_risk = (2 - n_tokens[1]) * (cost - 1)  # all of it is lost if the first guess is wrong
            if n_tokens[n] / cost > speed and at_risk <= self._balance:
                best, speed = n, n_tokens[n] / cost
        return best
