"""Finds how large a generated context may be to fit in a number of tokens."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator

from pypcd.errors import InputError
from pypcd.evaluation.tasks.sample import Sample, Task, Tokenizer

__all__ = ["Make", "Sized", "largest"]

Make = Callable[[int, int, int], Iterator[Sample]]  # questions, of their number, their size and a seed


class Sized(Task):
    """A benchmark whose questions of one length all have the same size, the largest at which each prompt and its answer fit.

    Attributes:
        smallest: the smallest size that makes a question. A size is the number of pairs or sentences in each context.
    """

    smallest: int

    @abc.abstractmethod
    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        """n questions of a size."""

    def at_length(self, n_tokens: int, tokenizer: Tokenizer, seed: int) -> Make:
        """questions(), or what makes them where a length decides more than their size."""
        return self.questions

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        self.check(n, n_tokens)
        make, limits = self.at_length(n_tokens, tokenizer, seed), (n_tokens, self.max_tokens, tokenizer)
        longest = max(make(n, self.smallest, seed), key=lambda sample: tokenizer.count(sample.prompt))
        largest(lambda size: longest, self.smallest, *limits, most=self.smallest)  # an error if it does not fit
        # The first sample gives an upper bound. Counting all samples at every step would take n times as long, and the others
        # differ by only a few tokens.
        size = largest(lambda size: next(make(n, size, seed)), self.smallest, *limits)
        while any(tokenizer.count(sample.prompt) + self.max_tokens > n_tokens for sample in make(n, size, seed)):
            size -= 1
        return list(make(n, size, seed))


def largest(
    make: Callable[[int], Sample],
    size: int,
    n_tokens: int,
    n_answer: int,
    tokenizer: Tokenizer,
    most: int | None = None,
) -> int:
    """The largest size at which one sample and its answer fit in n_tokens, however large the others are.

    Args:
        make: returns the sample of a size.
        size: the smallest one.
        most: no size is larger.

    Raises:
        ValueError: even the smallest size does not fit.
    """

    def need(size: int) -> int:
        return tokenizer.count(make(size).prompt) + n_answer

    def fits(size: int) -> bool:
        return (most is None or size <= most) and need(size) <= n_tokens

    if not fits(size):
        raise InputError(
            f"n_tokens is {n_tokens}; allowed: at least {need(size)}, for the smallest context and {n_answer} tokens of answer"
        )
    step = 1
    while fits(size + step):
        size, step = size + step, 2 * step
    while step > 1:  # size + step does not fit
        step //= 2
        size += step if fits(size + step) else 0
    return size
