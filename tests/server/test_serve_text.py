"""A setting written as text means the same in a request to `pypcd serve` as in pypcd.Llama(pcd=...): one language."""

from __future__ import annotations

import random
from typing import Any

import pytest
from serving import BASE, PROMPTS, complete, is_greedy, llm, ready, refused, server  # noqa: F401

import pypcd
from pypcd import PCDConfig
from pypcd.config import PRESETS
from pypcd.server import Server

OWN = (
    "beta",
    "gamma",
    "relative_top",
    "adaptive",
    "min_context",
    "min_entropy",
    "min_first_entropy",
    "window",
    "n_sink",
)
VALUES = {
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
    "bta": ["1"],
    "Beta": ["1"],
    "": ["1"],
}
FIRST = ["on", "off", "ON", "Gentle", "gentle", "window", "cautious", "paper", "gentel", "pcd", "true", ""]


def text(rng: random.Random) -> str:
    names = [name for name in VALUES if name and name in (*OWN, "perturbation")] * 6 + list(VALUES)
    words = [f"{name}={rng.choice(VALUES[name])}" for name in rng.choices(names, k=rng.randrange(0, 4))]
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


def test_a_text_means_what_it_means_in_python(server: Server) -> None:  # noqa: F811
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
            own = {name: getattr(wanted, name) for name in (*OWN, "perturbation")}
            assert {name: got[name] for name in own} == pytest.approx(own), given
        kinds["setting" if wanted else "off"] += 1
    assert min(kinds.values()) >= 3 and kinds["setting"] > 100 and kinds["refused"] > 100, kinds


@pytest.mark.parametrize("given", ["window:relative_top=0.1", "beta=4:gamma=3", "paper:beta=30"])
def test_an_answer_is_that_of_llama_with_the_same_text(
    given: str,
    server: Server,  # noqa: F811
    llm: pypcd.Llama,  # noqa: F811
) -> None:
    for prompt in PROMPTS:
        fields = PCDConfig.resolve(given).as_dict()
        is_greedy(llm, prompt, fields, complete(server, prompt, pcd=given)["tokens"])


def test_a_text_is_a_whole_setting_and_an_object_a_change() -> None:
    with ready(pcd="window:beta=0.5", parallel=1) as made:

        def beta_and_window(**fields: Any) -> tuple[float, Any]:
            got = complete(made, "a", n_predict=1, **fields)["generation_settings"]["pcd"]
            return got["beta"], got["window"]

        assert beta_and_window() == beta_and_window(pcd={}) == (0.5, 64)
        assert beta_and_window(pcd={"beta": 2}) == (2, 64)
        assert beta_and_window(pcd="beta=2") == (2, None) and beta_and_window(pcd="gamma=5") == (2.5, None)
        gentle = PRESETS["gentle"].fields
        for asked in ({"pcd": True}, {"pcd": "on"}, {"model": "demo:pcd"}):
            assert beta_and_window(**asked) == (gentle["beta"], gentle["window"])
        assert beta_and_window(pcd="on:beta=3") == (3, 64) and beta_and_window(pcd="paper") == (2.5, None)
        assert beta_and_window(pcd="paper:window=8") == (2.5, 8)
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("gentel", 'it is "gentel"; allowed: true, false, "paper", "gentle"'),
        ("Gentel:beta=1", 'it is "Gentel:beta=1"; allowed: true, false, "paper", "gentle"'),
        ("tuned.json", 'it is "tuned.json"; allowed: true, false, "paper", "gentle"'),
        ("blog:beta=1", 'it is "blog:beta=1", a preset that only `pypcd serve --pcd` can put in force; allowed: '),
        ("beta=x", 'beta is "x"; allowed: a number'),
        ("beta=-1", "beta is -1, allowed: 0 to 1000"),
        ("gamma=1.5", "gamma is 1.5; allowed: an integer"),
        ("bta=1", 'there is no field "bta"; a request may change beta, gamma'),
        ("alpha=0.3", "alpha is 0.3, this server's is 0.2, which only `pypcd serve --pcd` can change"),
        ("beta=1:beta=2", 'it is "beta=1:beta=2", where beta is given twice; give it once'),
        (
            "beta=1:off",
            'it is "beta=1:off", and "off" in it is no value; allowed: name=value, joined by colons, such as ',
        ),
        ("window: beta=1", 'and " beta=1" in it is no value; allowed: name=value, joined by colons, such as '),
        ("beta=1,gamma=3", 'and "beta=1,gamma=3" in it is no value; allowed: name=value, joined by colons, such as '),
        ("beta=", 'and "beta=" in it is no value; allowed: name=value'),
        (":", 'it is ":"; allowed: true, false, "paper"'),
        ("x" * 200000, "; allowed: true, false"),
        ("beta=1:" * 5000, "; give it once"),
    ],
    ids=lambda value: value[:20],
)
def test_a_wrong_text_is_refused_with_a_sentence(given: str, message: str, server: Server) -> None:  # noqa: F811
    assert f"Field 'pcd': {message}" in (said := refused(server, pcd=given)) or (
        message[0] in ";a" and said.startswith("Field 'pcd': ") and message in said
    )
