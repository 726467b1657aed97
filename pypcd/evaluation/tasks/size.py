"""Finds how large a generated context may be to fit in a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pypcd.errors import InputError
from pypcd.evaluation.tasks.sample import Sample, Tokenizer
from pypcd.settings.ranges import Integer

__all__ = ["check_cell", "fill", "largest"]


def check_cell(n: int, n_tokens: int) -> None:
    """
    Raises:
        ValueError: one of them is not an integer of at least 1.
    """
    Integer(1)("n", n)
    Integer(1)("n_tokens", n_tokens)


def fill(
    make: Callable[[int], Iterable[Sample]], smallest: int, n_tokens: int, n_answer: int, tokenizer: Tokenizer
) -> list[Sample]:
    """The samples of the largest size at which every prompt and its answer fit in n_tokens.

    Args:
        make: returns the samples of a size, which is the number of pairs or sentences in each context.
        smallest: the smallest size that makes a question.
        n_answer: tokens of an answer.

    Raises:
        ValueError: even the smallest size does not fit.
    """

    def need(sample: Sample) -> int:
        return tokenizer.count(sample.prompt) + n_answer

    def first_fits(size: int) -> bool:
        return need(next(iter(make(size)))) <= n_tokens

    def all_fit(size: int) -> bool:
        return all(need(sample) <= n_tokens for sample in make(size))

    if not all_fit(smallest):
        needed = max(need(sample) for sample in make(smallest))
        raise _too_short(n_tokens, needed, n_answer)
    # The first sample gives an upper bound. Counting all samples at every step would take n times as long, and the others
    # differ by only a few tokens.
    size, too_large = smallest, 2 * smallest
    while first_fits(too_large):
        size, too_large = too_large, 2 * too_large
    while too_large - size > 1:
        middle = (size + too_large) // 2
        size, too_large = (middle, too_large) if first_fits(middle) else (size, middle)
    while not all_fit(size):
        size -= 1
    return list(make(size))


def largest(
    make: Callable[[int], Sample],
    smallest: int,
    n_tokens: int,
    n_answer: int,
    tokenizer: Tokenizer,
    *,
    near: int,
    most: int | None = None,
) -> int:
    """The largest size at which one sample and its answer fit in n_tokens, however large the others are.

    Args:
        make, smallest, n_answer: as in fill().
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
    size, too_large, step = smallest, max(near, smallest) + 1, 1
    if near > smallest and not fits(near):  # the guess is too large: go down from it in growing steps
        too_large = near
        while too_large - step > smallest and not fits(too_large - step):
            too_large, step = too_large - step, 2 * step
        size = max(smallest, too_large - step)
    else:  # go up from it
        size = max(near, smallest)
        while fits(too_large):
            size, too_large, step = too_large, too_large + 2 * step, 2 * step
    while too_large - size > 1:
        middle = (size + too_large) // 2
        size, too_large = (middle, too_large) if fits(middle) else (size, middle)
    return size


def _too_short(n_tokens: int, needed: int, n_answer: int) -> InputError:
    return InputError(
        f"n_tokens is {n_tokens}; allowed: at least {needed}, for the smallest context and {n_answer} tokens of answer"
    )
