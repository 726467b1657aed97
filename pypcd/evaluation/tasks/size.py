"""Finds how large a generated context may be to fit in a number of tokens."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator

from pypcd.errors import InputError
from pypcd.evaluation.tasks.sample import Sample, Task, Tokenizer
from pypcd.settings.ranges import Integer

__all__ = ["Sized", "check_cell", "fill", "largest"]


def check_cell(n: int, n_tokens: int) -> None:
    """
    Raises:
        ValueError: one of them is not an integer of at least 1.
    """
    Integer(1)("n", n)
    Integer(1)("n_tokens", n_tokens)


class Sized(Task):
    """A benchmark whose questions of one length all have the same size, the largest at which each prompt and its answer fit.

    Attributes:
        smallest: the smallest size that makes a question. A size is the number of pairs or sentences in each context.
    """

    smallest: int

    @abc.abstractmethod
    def questions(self, n: int, size: int, seed: int = 0) -> Iterator[Sample]:
        """n questions of a size."""

    def samples(self, n: int, n_tokens: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
        check_cell(n, n_tokens)
        return fill(lambda size: self.questions(n, size, seed), self.smallest, n_tokens, self.max_tokens, tokenizer)


def fill(
    make: Callable[[int], Iterable[Sample]], smallest: int, n_tokens: int, n_answer: int, tokenizer: Tokenizer
) -> list[Sample]:
    """The samples of the largest size at which every prompt and its answer fit in n_tokens.

    Args:
        make: returns the samples of a size.
        n_answer: tokens of an answer.

    Raises:
        ValueError: even the smallest size does not fit.
    """

    def needs(size: int) -> Iterator[int]:
        return (tokenizer.count(sample.prompt) + n_answer for sample in make(size))

    if max(needs(smallest)) > n_tokens:
        raise _too_short(n_tokens, max(needs(smallest)), n_answer)
    # The first sample gives an upper bound. Counting all samples at every step would take n times as long, and the others
    # differ by only a few tokens.
    size = largest(lambda size: next(iter(make(size))), smallest, n_tokens, n_answer, tokenizer)
    while any(need > n_tokens for need in needs(size)):
        size -= 1
    return list(make(size))


def largest(
    make: Callable[[int], Sample],
    smallest: int,
    n_tokens: int,
    n_answer: int,
    tokenizer: Tokenizer,
    *,
    near: int = 0,
    most: int | None = None,
) -> int:
    """The largest size at which one sample and its answer fit in n_tokens, however large the others are.

    Args:
        make: returns the sample of a size.
        near: a guess, which saves time and changes nothing else.
        most: no size is larger.

    Raises:
        ValueError: even the smallest size does not fit.
    """

    def need(size: int) -> int:
        return tokenizer.count(make(size).prompt) + n_answer

    def fits(size: int) -> bool:
        return (most is None or size <= most) and need(size) <= n_tokens

    if not fits(smallest):
        raise _too_short(n_tokens, need(smallest), n_answer)
    size, step = smallest, max(smallest, 1)
    too_large = near
    if near <= smallest or fits(near):  # go up in growing steps, small ones from a guess
        size, step = (near, 1) if near > smallest else (size, step)
        too_large = size + step
        while fits(too_large):
            step *= 2
            size, too_large = too_large, too_large + step
    while too_large - size > 1:
        middle = (size + too_large) // 2
        size, too_large = (middle, too_large) if fits(middle) else (size, middle)
    return size


def _too_short(n_tokens: int, needed: int, n_answer: int) -> InputError:
    return InputError(
        f"n_tokens is {n_tokens}; allowed: at least {needed}, for the smallest context and {n_answer} tokens of answer"
    )
