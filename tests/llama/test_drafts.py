"""How many guesses of a draft model are evaluated: as many as pay. Time is made up throughout."""

from __future__ import annotations

import itertools
import random
from typing import Any, Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pypcd import drafts as drafts_module
from pypcd.drafts import Drafts

# what a step costs by its number of tokens, in plain steps: a 1.1B model on one core, plain and with PCD; a GPU; a CPU
# bound by arithmetic; kernels that are slow as soon as there are two tokens
COSTS: dict[str, Callable[[int], float]] = {
    "cpu": lambda n: {1: 1.0, 2: 0.9, 3: 0.95, 4: 1.02}.get(n, 1.02 + 0.25 * (n - 4)),
    "cpu-pcd": lambda n: {1: 1.0, 2: 1.25, 3: 2.0}.get(n, 1 + 0.48 * (n - 1)),
    "gpu": lambda n: 1 + 0.02 * (n - 1),
    "arithmetic": float,
    "jump": lambda n: 1.0 if n == 1 else 2 + 0.02 * n,
}
Hits = Callable[[int], bool]  # whether the guess of a token is right
TEXTS: dict[str, Hits] = {
    "never": lambda i: False,
    "always": lambda i: True,
    "often": lambda i: i * 7919 % 10 < 8,
    "half": lambda i: i * 7919 % 10 < 5,
    "seldom": lambda i: i * 7919 % 10 < 1,
    "passages": lambda i: i // 80 % 2 == 1,
    "names": lambda i: i % 25 < 4,
}


class World:
    """A text, a draft model that guesses it, and steps that take made-up time."""

    START = 10  # tokens of the prompt

    def __init__(self, cost: Callable[[int], float], right: Hits, n_guesses: int = 10, asking: float = 0.0) -> None:
        self.cost, self.right, self.n_guesses, self.asking = cost, right, n_guesses, asking
        self.seconds, self.n_asked, self.sizes = 0.0, 0, []
        self.text = list(range(self.START + 1))
        self.drafts = Drafts(self.guess, 1 << 20, 512, clock=lambda: self.seconds)
        assert not self.drafts.starts_step("setting")

    def guess(self, input_ids: Any, /, **kwargs: Any) -> Any:
        self.seconds += self.asking
        self.n_asked += 1
        return np.array([i if self.right(i) else -1 for i in range(len(input_ids), len(input_ids) + self.n_guesses)])

    def run(self, n: int) -> float:
        """n tokens more, or a few; returns seconds for each."""
        before, made = self.seconds, len(self.text)
        while len(self.text) < made + n:
            guesses = self.drafts(np.array(self.text)).tolist()
            assert self.drafts.starts_step("setting")
            spent = self.cost(1 + len(guesses))
            self.seconds += spent
            self.sizes.append(1 + len(guesses))
            self.drafts.note(1 + len(guesses), spent)
            for guess in [*guesses, None]:
                self.text.append(len(self.text))
                if guess != self.text[-1]:
                    break
        return (self.seconds - before) / (len(self.text) - made)


@settings(max_examples=150)
@given(
    first=st.floats(0.2, 3),
    more=st.lists(st.floats(0, 2), min_size=64, max_size=64),
    hits=st.lists(st.booleans(), min_size=1, max_size=60),
    n_guesses=st.integers(0, 64),
    asking=st.sampled_from([0.0, 0.001, 0.1, 2.0]),
    n=st.integers(1, 300),
)
def test_guesses_never_cost_more_than_the_account_allows(
    first: float, more: list[float], hits: list[bool], n_guesses: int, asking: float, n: int
) -> None:
    """Whatever steps cost and guesses are: 3% of decoding without, and a start: two steps and two questions before
    anything is known, and, now and then, a step that turns out to cost more than expected."""
    costs = [1.0, *itertools.accumulate(more, initial=first)]
    world = World(lambda n: costs[n - 1], lambda i: hits[i % len(hits)], n_guesses, asking)
    world.run(n)
    n_made = len(world.text) - world.START - 1
    surprise = max(costs[size - 1] for size in world.sizes)
    assert (
        world.seconds
        <= (1 + drafts_module.ALLOWANCE) * n_made + drafts_module.START + surprise * (1 + n_made // 250) + 3 * asking
    )


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("cost", COSTS)
def test_a_text_is_not_slower_than_without_guesses(cost: str, text: str) -> None:
    assert World(COSTS[cost], TEXTS[text]).run(400) <= 1.04


@pytest.mark.parametrize("cost", COSTS)
def test_what_is_copied_gains_most_of_what_it_can(cost: str) -> None:
    """The best number of guesses, known from the start, as the other side."""
    best = min([1.0, *(COSTS[cost](1 + n) / (1 + n) for n in range(1, 11))])
    world = World(COSTS[cost], TEXTS["always"])
    world.run(200)
    assert world.run(400) <= 1.15 * best + 0.05


def test_a_text_that_can_no_longer_be_guessed_costs_little_and_is_tried_again() -> None:
    world = World(COSTS["cpu-pcd"], lambda i: i < 300 or i > 700)
    assert world.run(290) < 0.7
    assert world.run(400) < 1.03 and max(world.sizes[-200:]) == 1
    world.run(30)
    assert world.run(200) < 0.65


def test_a_disturbed_step_does_not_end_the_guessing() -> None:
    world = World(COSTS["cpu-pcd"], TEXTS["always"])
    world.run(200)
    fair, world.cost = world.cost, lambda n: 50 * COSTS["cpu-pcd"](n)
    world.run(1)
    world.cost = fair
    world.run(150)
    assert world.run(200) < 0.7


def test_noise_costs_little() -> None:
    for seed in range(2):
        noise = random.Random(seed)
        for cost, text in itertools.product(COSTS.values(), TEXTS.values()):
            plain, world = [], World(cost, text)

            def disturbed(n: int, cost: Any = cost, plain: Any = plain, noise: Any = noise) -> float:
                factor = noise.lognormvariate(0, 0.2) * (10 if noise.random() < 0.02 else 1)
                plain.append(factor)
                return factor * cost(n)

            world.cost = disturbed
            assert world.run(600) <= 1.08 * np.mean(plain)


def test_steps_that_become_dear_are_no_longer_made() -> None:
    world = World(COSTS["gpu"], TEXTS["always"])
    assert world.run(300) < 0.2
    world.cost = lambda n: 1.0 if n == 1 else 3.0 * n
    world.run(60)
    assert world.run(200) < 1.04
    world.cost = COSTS["gpu"]
    world.run(200)
    assert world.run(300) < 0.2


def test_a_slow_draft_model_is_asked_only_where_it_pays() -> None:
    useless, useful = (World(COSTS["gpu"], TEXTS[text], asking=0.5) for text in ("never", "always"))
    assert useless.run(400) < 1.04 and useless.n_asked < 30
    assert useful.run(400) < 0.25


def test_another_setting_or_text_is_measured_anew() -> None:
    world = World(COSTS["gpu"], TEXTS["always"])
    world.run(100)
    for setting, follows_a_call in (("other", True), ("other", False)):
        if follows_a_call:
            world.drafts(np.array(world.text))
        assert world.drafts.starts_step(setting) == follows_a_call
        for _ in range(2):  # plain steps, to know what they cost
            assert len(world.drafts(np.array(world.text))) == 0
            assert world.drafts.starts_step(setting)
            world.drafts.note(1, 1.0)
            world.text.append(len(world.text))
        assert len(world.drafts(np.array(world.text))) > 0
        world.drafts.starts_step(setting)


@given(
    n_ctx=st.integers(1, 300), n_batch=st.integers(1, 200), n_text=st.integers(1, 300), n_guesses=st.integers(0, 200)
)
def test_tokens_and_twins_always_have_room(n_ctx: int, n_batch: int, n_text: int, n_guesses: int) -> None:
    drafts = Drafts(lambda ids: np.arange(n_guesses), n_ctx, n_batch)
    drafts._choose = lambda most: most  # type: ignore[method-assign]
    n = len(drafts(np.arange(n_text)))
    assert n == 0 or (n_text - 1 + 2 * (1 + n) <= n_ctx and 2 * (1 + n) <= n_batch and n <= min(n_guesses, 63))
    assert n == min(n_guesses, 63) or n_text - 1 + 2 * (2 + n) > n_ctx or 2 * (2 + n) > n_batch


def test_the_cost_of_a_size_that_was_not_measured_lies_between_its_neighbours() -> None:
    times = drafts_module.StepTimes()
    assert times.wants_plain() and times.plain() is None
    for n, seconds in ((1, 2.0), (1, 2.0), (5, 4.0), (9, 12.0)):
        times.note(n, seconds)
    assert [times.of(n) for n in (1, 3, 5, 7, 9)] == [1.0, 1.5, 2.0, 4.0, 6.0]
    assert times.of(17) == 6.0 + 8 * (6.0 - 1) / 8 and times.largest() == 9
    for _ in range(times.OLD):
        times.note(1, 2.0)
    assert times.largest() == 1 and times.of(5) == 1 + 4 * times.SLOPE


def test_expected_tokens_follow_what_was_seen() -> None:
    hits = drafts_module.Hits()
    assert hits.n_tokens(2) == [1, 1.5, 1.75]
    for right in [True] * 40 + [False]:
        hits.note(right)
    once = hits.n_tokens(1)[1]
    hits.run = 20
    assert 8 < hits.n_tokens(10)[10] < 11 and 1.4 < once < hits.n_tokens(1)[1] < 2
