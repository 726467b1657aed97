"""Finds how large a generated context may be to fit in a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pypcd._checks import Integer
from pypcd.evaluation.tasks._sample import Sample, Tokenizer

__all__ = ["check_cell", "fill"]


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
        raise ValueError(
            f"n_tokens is {n_tokens}; allowed: at least {needed}, for the smallest context and "
            f"{n_answer} tokens of answer"
        )
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
