"""A setting written as text means the same in a request to `pypcd serve` as in pypcd.Llama(pcd=...): one language."""

from __future__ import annotations

import random
from typing import Any

import pytest
from serving import complete, ready, refused

from pypcd import PCDConfig
from pypcd.server import Server

pytest_plugins = ["serving"]  # fixtures

VALUES = {  # of the fields that a request may change
    "beta": ["1", "0.5", ".5", "2.", "1e1", "+3", "-1", "x", "1e400", "inf", "nan", "0x10", "none", "1e", "--1"],
    "gamma": ["5", "007", "+8", "0", "1.0", "1e2", "-3", "99999999999999999999", "off"],
    "relative_top": ["0", "0.1", "1e-2", "1.5", "-0.1"],
    "adaptive": ["jsd", "none", "off", "None", "JSD", "0"],
    "min_context": ["0", "300", "-1", "3.5"],
    "min_entropy": ["0", "1.25", "-1"],
    "min_first_entropy": ["2.25", "0"],
    "window": ["64", "none", "OFF", "0", "all", "-4"],
    "n_sink": ["0", "4", "none"],
    "perturbation": ["none", "off"],
}
NO_FIELDS = {"bta": ["1"], "Beta": ["1"], "": ["1"]}
FIRST = ["on", "off", "ON", "Unsure", "unsure", "window", "cautious", "paper", "gentle", "pcd", "true", ""]


def text(rng: random.Random) -> str:
    values = {**VALUES, **NO_FIELDS}
    names = [*VALUES] * 7 + [*NO_FIELDS]
    words = [f"{name}={rng.choice(values[name])}" for name in rng.choices(names, k=rng.randrange(0, 4))]
    if rng.random() < 0.5 or not words:
        words.insert(0, rng.choice(FIRST))
    made = ":".join(words)
    return rng.choice(
        [made] * 12 + [f" {made} ", f"{made}:", made.replace(":", ","), made.replace("=", " = "), made[:-1]]
    )


def meant(given: str) -> Any:
    """What pypcd.Llama makes of it: a setting, False, or the exception."""
    try:
        return PCDConfig.resolve(given) or False
    except (ValueError, TypeError) as error:
        return error


def test_a_text_means_what_it_means_in_python(server: Server) -> None:
    rng, kinds = random.Random(1), {"setting": 0, "off": 0, "refused": 0}
    texts = ["off", "OFF", "window:relative_top=0.1", "beta=1.5:window=64", *(text(rng) for _ in range(400))]
    for given in texts:
        wanted = meant(given)
        if isinstance(wanted, Exception):
            said = refused(server, pcd=given)
            assert said.startswith("Field 'pcd': "), (given, said)
            kinds["refused"] += 1
            continue
        got = complete(server, "a", n_predict=1, pcd=given)["generation_settings"]["pcd"]
        if wanted is False:
            assert got is False, given
        else:
            own = {name: getattr(wanted, name) for name in VALUES}
            assert {name: got[name] for name in own} == pytest.approx(own), given
        kinds["setting" if wanted else "off"] += 1
    assert min(kinds.values()) >= 3 and kinds["setting"] > 100 and kinds["refused"] > 100, kinds


def test_a_text_is_a_whole_setting_and_an_object_a_change() -> None:
    with ready(pcd="window:beta=0.5", parallel=1) as made:

        def beta_and_window(**fields: Any) -> tuple[float, Any]:
            got = complete(made, "a", n_predict=1, **fields)["generation_settings"]["pcd"]
            return got["beta"], got["window"]

        assert beta_and_window() == beta_and_window(pcd={}) == (0.5, 64)
        assert beta_and_window(pcd={"beta": 2}) == (2, 64)
        assert beta_and_window(pcd="beta=2") == (2, None)
        assert beta_and_window(pcd="on:beta=3") == (3, 64)
        assert beta_and_window(pcd="gamma=3", model="demo:pcd-cautious") == (2.5, None)
        assert beta_and_window(pcd={"gamma": 3}, model="demo:pcd-cautious") == (1.5, None)


def test_a_text_that_means_another_rotation_is_refused_and_an_object_is_not() -> None:
    with ready(pcd="alpha=0.3:cache=shared:evaluation=alternate", parallel=1) as made:
        for given in ("beta=1.5", "gamma=5", "paper"):
            said = refused(made, pcd=given)
            assert said.startswith("Field 'pcd': ") and ("only" in said or "alpha" in said), said
        own = complete(made, "a", n_predict=1, pcd={"beta": 1.5})["generation_settings"]["pcd"]
        assert (own["beta"], own["window"]) == (1.5, None)
        own = complete(made, "a", n_predict=1, pcd="perturbation=none:window=8")["generation_settings"]["pcd"]
        assert (own["beta"], own["window"], own["perturbation"]) == (2.5, 8, "none")
