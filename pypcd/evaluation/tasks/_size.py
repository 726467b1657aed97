"""How much of a generated context fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pypcd.evaluation.tasks._sample import Sample, Tokenizer

__all__ = ["check_cell", "fill"]


def check_cell(n: int, n_tokens: int) -> None:
    """
    Raises:
        ValueError: one of them is not an integer of at least 1.
    """
    for name, value in (("n", n), ("n_tokens", n_tokens)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; allowed: an integer of at least 1")


def fill(
    make: Callable[[int], Iterable[Sample]], smallest: int, n_tokens: int, n_answer: int, tokenizer: Tokenizer
) -> list[Sample]:
    """The samples of a size at which every prompt and its answer fit in n_tokens, and at one more not all do.

    Args:
        make: the samples of a size: so many pairs or sentences in the context of each.
        smallest: the size below which there is no question.
        n_answer: tokens of an answer.

    Raises:
        ValueError: not even the smallest fits.
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
            f"n_tokens is {n_tokens}; allowed: at least {needed}, the shortest of these prompts "
            f"with {n_answer} tokens for its answer"
        )
    # Where the first sample stops to fit bounds the size from above; counting all samples at every step would take n
    # times as long, and the others differ by a few tokens.
    size, too_large = smallest, 2 * smallest
    while first_fits(too_large):
        size, too_large = too_large, 2 * too_large
    while too_large - size > 1:
        middle = (size + too_large) // 2
        size, too_large = (middle, too_large) if first_fits(middle) else (size, middle)
    while not all_fit(size):
        size -= 1
    return list(make(size))
