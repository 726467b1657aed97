"""The picture of one token: what its twin sees, against the engine, and where answers stand, against places counted by hand; what is
drawn of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from conftest import F32, SMALL
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from test_plots import apart, rendered
from tiny_gguf import write_tiny_gguf

import pypcd
from pypcd.cli import _terminal, main
from pypcd.explain import Candidate, Step
from research import one_answer, plots
from research.command import command
from research.one_answer import PCD, PLAIN, Answer, Mark, decisive, draw, find, marks, named, seen

BLUE, RED, BLACK = plots.BLUE, plots.VERMILLION, plots.BLACK


@pytest.mark.parametrize(
    ("n", "fields", "wanted"),
    [
        (100, {"window": 64}, [(0, 4), (36, 100)]),
        (100, {"window": 64, "n_sink": 0}, [(36, 100)]),
        (69, {"window": 64}, [(0, 4), (5, 69)]),  # all but one
        (68, {"window": 64}, [(0, 68)]),  # the first and the last touch
        (3, {"window": 1}, [(0, 3)]),
        (100, {"window": 64, "n_sink": 500}, [(0, 100)]),
        (100, {}, [(0, 100)]),
    ],
)
def test_the_twin_sees_the_first_tokens_and_the_last(n, fields, wanted) -> None:
    assert [(part.start, part.stop) for part in seen(n, pypcd.PCDConfig(**fields))] == wanted


def test_what_is_said_to_be_seen_is_what_the_engine_sees(tmp_path) -> None:
    """In a model of one layer a token's key depends on this token alone, so another one that is not seen changes nothing."""
    setting, n = pypcd.PCDConfig.preset("window").replace(window=6, n_sink=2), 14
    llm = pypcd.Llama(str(write_tiny_gguf(tmp_path / "one.gguf", n_layer=1)), **{**SMALL, **F32}, pcd=setting)

    def local(tokens: list[int]) -> np.ndarray:
        llm.reset()
        llm.eval(tokens)
        return llm.pcd_logits().local.copy()

    tokens = [10 + 3 * i for i in range(n)]
    first = local(tokens)
    changed = [not np.array_equal(first, local([*tokens[:i], 200, *tokens[i + 1 :]])) for i in range(n)]
    llm.close()
    assert [i for i, is_changed in enumerate(changed) if is_changed] == [i for part in seen(n, setting) for i in part]


#         0    1(control) 2    3    4    5    6     7     8    9
PIECES = [b"A", b"", b"my is", b" 2", b"81", b", B", b"ob is ", b"71", b".\n", b"Amy is 2813."]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("281", [(3, 5)]),  # not in 2813
        ("81", []),
        ("71", [(7, 8)]),
        ("Amy is", [(0, 3), (9, 10)]),
        ("281, Bob is 71.", [(3, 9)]),
        ("", []),
    ],
)
def test_a_text_is_found_in_whole_words(text, wanted) -> None:
    assert [(span.start, span.stop) for span in find(PIECES, text)] == wanted


def test_texts_in_any_script_are_found_though_a_token_ends_within_a_character() -> None:
    pieces = [b"caf\xc3", b"\xa9 \xe6\xbc", b"\xa2\xe5\xad\x97\xe3\x81", b"\xaf \xff", b"caf\xc3\xa9", b"s"]
    assert find(pieces, "café") == (range(2),)  # not in cafés
    assert find(pieces, "漢字") == (range(1, 3),)


@pytest.mark.parametrize(
    ("line", "wanted"), [("281, Bob is 99", "281, Bob is"), ("71.", "71"), ("28", ""), ("99 71", ""), ("", "")]
)
def test_what_an_answer_takes_from_the_prompt(line, wanted) -> None:
    assert named(PIECES, line) == wanted


def test_answers_are_judged_by_what_was_written() -> None:
    assert Answer.of('": 281.\nBob', 0, False, "281") == Answer("281.", True)
    assert Answer.of(" 71.\n", 0, False, "281") == Answer("71.", False) == Answer.of(" 71.", 0, True, "281")
    assert Answer.of(" 71", 0, False, "281") == Answer("71 …", None)  # it was cut: the right one may still come
    assert Answer.of("It is 281.", 7, True, "") == Answer("281.", None)  # from the word on in which they differ


def test_the_right_answer_is_marked_first_and_what_was_written_in_its_place() -> None:
    right, wrong, none = Answer("281.", True), Answer("71.", False), Answer("99.", False)
    amy, bob = (range(3, 5),), (range(7, 8),)

    def made(plain: Answer, pcd: Answer, gold: str) -> list[Mark]:
        return marks(PIECES, {PLAIN: plain, PCD: pcd}, gold)

    there, line = "the right answer: Amy is 281", "Amy is 281, Bob is 71"
    assert made(wrong, right, "281") == [Mark(there, BLUE, amy), Mark(f"{PLAIN} writes: {line}", RED, bob)]
    assert made(right, wrong, "281") == [Mark(there, RED, amy), Mark(f"PCD writes: {line}", BLUE, bob)]
    assert made(wrong, none, "281") == [Mark(there, BLACK, amy), Mark(f"{PLAIN} writes: {line}", RED, bob)]
    assert made(none, right, "281") == [Mark(there, BLUE, amy)]
    assert made(none, none, "12345") == [Mark("the right answer, 12345, does not stand in the prompt", BLACK, ())]
    unknown = made(Answer("71.", None), Answer("281.", None), "")
    assert [(mark.colour, mark.spans) for mark in unknown] == [(RED, bob), (BLUE, amy)]


def a_step(chosen: str = '"28"', plain: str = '"71"') -> Step:
    def candidate(text, before, rank_before, local, after, rank_after) -> Candidate:
        return Candidate(rank_before, text, before, rank_before, local, after, rank_after, rank_after == 1, False)

    return Step(
        0,
        (
            candidate(chosen, 0.25, 2, 0.01, 0.875, 1),
            candidate('"third"', 0.05, 4, 0.1, 0.1, 2),
            candidate('"fourth"', 0.02, 5, 0.0, 0.0, None),
            candidate('"second"', 0.06, 3, 0.05, 0.0, 7),
            candidate(plain, 0.5, 1, 0.75, 0.005, 9),
        ),
        1.5,
    )


RIGHT = Mark("the right answer: Amy is 28-11", BLUE, (range(12, 15),))
WRONG = Mark("plain decoding writes: Bob is 71-00", RED, (range(31, 34),))
ANSWERS = {PLAIN: Answer("71-00", False), PCD: Answer("28-11", True)}


def a_token(*marks: Mark, n: int = 40, seen: tuple[range, ...] = (range(4), range(24, 40))) -> Figure:
    return draw(a_step(), n, seen, marks, ANSWERS, "It is")


def test_the_first_token_of_the_right_answer_that_is_changed_is_drawn() -> None:
    def step(is_gold: bool, is_changed: bool = True) -> Step:
        own = Candidate(1, "a", 0.2, 1 + is_changed, 0.1, 0.9, 1, True, is_gold)
        return Step(0, (own, Candidate(2, "b", 0.2, 2 - is_changed, 0.1, 0.1, 2, False, False)), 1.5)

    plain, first, second = step(True, is_changed=False), step(False), step(True)
    assert decisive([plain, first, second, step(True)]) is second
    assert decisive([plain, first]) is first and decisive([plain]) is None


def test_bars_are_the_probabilities() -> None:
    _, *panels = a_token(RIGHT, WRONG).axes
    shown = [[round(bar.get_width(), 6) for bar in axes.patches] for axes in panels]
    # the token of plain decoding, PCD's, the two likeliest others, and what is left of 100%
    assert shown == [[50, 25, 6, 5, 14], [75, 1, 5, 10, 9], [0.5, 87.5, 0, 10, 2]]
    labels = [label.get_text() for label in panels[0].get_yticklabels()]
    assert labels == ['"71"', '"28"', '"second"', '"third"', "all others"]
    assert [text.get_text() for text in panels[0].texts] == ["50.0%", "25.0%", "6.0%", "5.0%", "14.0%"]
    assert panels[2].get_title(loc="left") == "2.5 L − 1.5 L*\nafter the contrast"
    labels = [axes.get_xlabel() for axes in panels]
    assert "✗ 71-00 (wrong)" in labels[0] and "✓ 28-11 (right)" in labels[2]


def lane(figure: Figure, y: int) -> list[tuple[float, float, str]]:
    """What is drawn in the lane of L (1) or of L* (0): where it begins and ends, and its colour, or that of its dotted outline."""
    bars = [bar for bar in figure.axes[0].patches if bar.get_y() + bar.get_height() / 2 == pytest.approx(y)]
    looks = [
        f": {to_hex(bar.get_edgecolor())}" if bar.get_linestyle() == ":" else to_hex(bar.get_facecolor())
        for bar in bars
    ]
    ends = [(round(bar.get_x(), 6), round(bar.get_x() + bar.get_width(), 6)) for bar in bars]
    return [(*end, look) for end, look in zip(ends, looks)]


def test_a_lane_shows_what_its_evaluation_sees_and_the_answers_in_it() -> None:
    figure, grey, white, blue, red = a_token(RIGHT, WRONG), "#d1d1d1", "#ffffff", BLUE.lower(), RED.lower()
    assert lane(figure, 1) == [(0, 40, white), (0, 40, grey), (12, 15, blue), (31, 34, red)]
    assert lane(figure, 0) == [
        (0, 40, white), (0, 4, grey), (24, 40, grey), (12, 15, f": {blue}"), (31, 34, red)
    ]  # fmt: skip
    strip = figure.axes[0]
    assert [label.get_text() for label in strip.get_yticklabels()] == ["L sees", "L* sees"]
    assert strip.get_title(loc="left") == "The text so far: L sees all 40 tokens, L* only the first 4 and the last 16"
    assert strip.get_xlabel() == "The next token, after “It is”:"
    assert [(text.get_text(), text.get_color()) for text in strip.texts] == [(m.text, m.colour) for m in (RIGHT, WRONG)]
    n = 200_000  # in a very long prompt they are wide enough to be seen
    far = Mark("", RED, (range(n - 1, n),)), Mark("", BLUE, (range(9, 10),))
    assert lane(a_token(*far, n=n), 1)[2:] == [(0.994 * n, n, red), (9, 9 + 0.006 * n, blue)]
    everything = a_token(seen=(range(40),)).axes[0].get_title(loc="left")
    assert everything == "The text so far: L and L* see all 40 tokens"


def test_texts_that_no_font_has_or_that_look_like_formulas_are_drawn_as_they_are(tmp_path) -> None:
    pieces = ["漢字 $ and a long beginning $x$_^ \\frac{ ".encode() * 4, b"281"]
    answers = {PLAIN: Answer("漢字" * 9 + " $x", False), PCD: Answer("\\frac$ $" * 9, None)}
    made = marks(pieces, answers, "281")
    step = a_step('"$a$ and a very long token"', '"\u202e漢字$\\frac"')
    figure = draw(step, 2, (range(2),), made, answers, "漢字 $x$ " * 40)
    plots.save(figure, tmp_path / "a.png")  # a missing glyph would be a warning, and a warning an error here
    strip, *panels = figure.axes
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names[0].startswith('"\\u202e') and names[1].startswith('"$a$ and a') and max(map(len, names)) <= 12
    renderer = rendered(figure)
    boxes = apart(renderer, [strip._left_title, strip.xaxis.label, *strip.texts])
    for axes in panels:
        boxes += apart(renderer, [*axes.get_yticklabels(), axes.xaxis.label, *axes.texts])
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= 0 for box in boxes)


def test_the_command_draws_a_token_that_plain_decoding_would_not_write(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(_terminal, "setup", lambda: None)
    drawn: dict[str, Any] = {}

    def drawing(*args: Any) -> Figure:
        drawn.update(zip(("step", "n_tokens", "seen", "marks", "answers", "text"), args))
        return draw(*args)

    monkeypatch.setattr(one_answer, "draw", drawing)
    assert main(["demo", "215"]) == 0  # chosen because PCD is right there, and plain decoding is not
    prompt, said = capsys.readouterr()
    right = said.split("right value is ")[1].split(",")[0]
    picture = tmp_path / "a.svg"
    words = ["demo", "-p", prompt, "--threads=1", "--max-tokens=8", f"--gold={right}", f"--out={picture}"]

    def run(*more: str) -> int:
        return command("one_answer", one_answer.add_arguments, one_answer.run, [*words, *more])

    assert run("--pcd=paper:beta=0") == 1
    assert "was not drawn: plain decoding writes the same" in capsys.readouterr().err and not picture.exists()
    assert run() == 0 and picture.read_bytes().startswith(b"<?xml")
    with pypcd.Llama("demo", n_threads=1) as llm:
        plain, mine = (
            llm(prompt, max_tokens=8, temperature=0, pcd=pcd)["choices"][0]["text"].strip() for pcd in (False, True)
        )
    assert plain != mine == right
    assert drawn["answers"] == {PLAIN: Answer(plain, False), PCD: Answer(right, True)}
    n, preset = drawn["n_tokens"], pypcd.PCDConfig.preset("unsure")  # what is on if one says no more than on
    assert drawn["seen"] == (range(preset.n_sink), range(n - preset.window, n))
    assert drawn["step"].beta == preset.beta and drawn["text"] == prompt
    [[here], [there]] = (mark.spans for mark in drawn["marks"])
    assert here.start < there.start < n  # the last value of the prompt is the wrong one
    assert drawn["marks"][1].text.endswith(plain)
