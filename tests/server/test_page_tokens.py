"""The page in Chromium: the tokens of an answer, their numbers, other candidates, and the comparison with plain decoding.

What is shown is held to the server's own numbers for the same prompt (n_probs).
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from browser import Chat, Script, candidates, event, expect, prompt_of, question
from playwright.sync_api import Locator
from serving import complete, counter

from pypcd.server import Server

N_PROBS = 8
HALF_A_DIGIT = 0.0501  # per cent: numbers are shown with one decimal


def shown(cell: str) -> float | None:
    """The number of a cell in per cent, or None where it has none."""
    found = re.search(r"(<\s*)?([\d.]+)\s*%", cell)
    return float(found[2]) if found else None


def is_near(cell: str, logarithm: float | None) -> bool:
    """Whether a cell shows exp(logarithm) in per cent, rounded; null: no number."""
    number = shown(cell)
    if logarithm is None or number is None:
        return logarithm is None and number is None
    wanted = 100 * math.exp(logarithm)
    return number >= wanted if "<" in cell else abs(number - wanted) <= HALF_A_DIGIT


def told(server: Server, *texts: str, **fields: Any) -> dict[str, Any]:
    """The server's own answer in a talk of these texts, with the numbers of its tokens."""
    return complete(server, prompt_of(server, *texts), n_probs=N_PROBS, **fields)


def table(dialog: Locator) -> list[list[str]]:
    """The cells of each candidate."""
    rows = dialog.get_by_role("row").all()[1:]
    return [row.get_by_role("rowheader").or_(row.get_by_role("cell")).all_inner_texts() for row in rows]


def go_on(chat: Chat, i: int, name: str) -> Script.Stream:
    """Go on with another candidate in place of the last answer's i-th token; the answer that the test makes up."""
    dialog = chat.open_token(chat.tokens(chat.answers.last).nth(i))
    dialog.get_by_role("button", name=re.compile(f"^Go on with.*{name}")).click()
    return chat.script.next(chat)


def is_changed(entry: dict[str, Any]) -> bool:
    """Whether the model alone would most probably have said another token, and PCD put this one first."""
    if entry["pcd"]["strength"] is None:
        return False
    options = [*entry["top_logprobs"], *({**out, "pcd": out} for out in entry["pcd"]["pushed_out"])]
    alone = max(options, key=lambda option: option["pcd"]["standard"])
    return alone["id"] != entry["id"]


# -- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["server's", "^off"])
def test_every_number_of_an_open_token_is_the_servers(chat: Chat, served: Server, label: str) -> None:
    text, _ = question(12)
    chat.pcd(label)
    answer = chat.ask(text)
    setting = {"server's": {}, "^off": False}[label]
    wanted = told(served, text, pcd=setting)["completion_probabilities"]
    tokens = chat.tokens(answer)
    expect(tokens).to_have_count(len(wanted))
    for i in (0, 1, len(wanted) - 1):
        dialog = chat.open_token(tokens.nth(i))
        headers = [one.strip() for one in dialog.get_by_role("columnheader").all_inner_texts()]
        assert headers[:4] == (["Token", "Model", "Local", "PCD"]), headers
        rows = table(dialog)
        options = wanted[i]["top_logprobs"]
        if setting is not False:
            options = [{**one, **one["pcd"]} for one in options] + wanted[i]["pcd"]["pushed_out"]
            n_out = sum(one["contrasted"] is None for one in options)
            assert sum("taken out" in " ".join(row) for row in rows) == n_out
        else:
            options = [
                {"standard": one["logprob"], "contrasted": one["logprob"], "local": None, **one} for one in options
            ]
        assert len(rows) == len(options)
        for option in options:
            columns = ["standard", "local", "contrasted"]
            assert any(
                all(is_near(cell, option[name]) for cell, name in zip(row[1:4], columns))
                and option["token"].strip() in row[0]
                for row in rows
            ), (option, rows)
        chat.button("Close", dialog).click()
        expect(dialog).to_be_hidden()


def test_what_pcd_changed_is_marked_and_counted(chat: Chat, served: Server) -> None:
    chat.set(longest_answer=40)
    answer = chat.ask("Say something")
    wanted = told(served, "Say something", n_predict=40)["completion_probabilities"]
    changed = [is_changed(entry) for entry in wanted]
    assert 0 < sum(changed) < len(changed), "or this shows little"
    expect(answer).to_contain_text(re.compile(rf"PCD \(paper\) changed {sum(changed)}\b"))
    expect(answer).to_contain_text(re.compile(rf"\b{len(wanted)} tokens"))
    tokens = chat.tokens(answer)
    expect(tokens).to_have_count(len(wanted))
    for token, is_marked in zip(tokens.all(), changed):
        if is_marked:
            expect(token).to_have_accessible_description(re.compile("changed by PCD"))
        else:
            expect(token).not_to_have_accessible_description(re.compile("changed by PCD"))


def test_tokens_are_the_text(chat: Chat, script: Script) -> None:
    words = ["Two", " words", ",", "\n", "\n", "* a", " list", " ", "  ", "<b>", " **", "bold", "**", "é", " \u202e?"]
    answer = chat.told(*words)
    assert chat.copied(answer) == "".join(words)
    tokens = chat.tokens(answer)
    expect(tokens).to_have_count(len(words))
    for token, word in zip(tokens.all(), words):
        name = token.get_attribute("aria-label") or token.inner_text()
        assert name.strip(), f"{word!r} has no name"
        assert word.strip() in name
    assert chat.copied(answer) == "".join(words)  # in this view too
    tops = [one.bounding_box()["y"] for one in tokens.all()]  # type: ignore[index]
    assert tops[2] == tops[3] < tops[4] < tops[5]  # behind a line's end begins another line
    chat.button("Tokens", answer).click()
    expect(answer.get_by_role("listitem")).to_have_text(re.compile("a list"))


def test_a_character_of_several_tokens(chat: Chat, script: Script) -> None:
    """Behind it the text goes on from its letters, since the three tokens before the last one are not known."""
    whole = {**event("🎉", 13), "tokens": [10, 11, 12, 13]}  # the server tells it with its last token
    answer = chat.told("a ", whole, *(event(" w1", 1, top_logprobs=candidates(1, 2)) for _ in range(2)))
    prompt = script.streams[0].body["prompt"]
    assert chat.copied(answer) == "a 🎉 w1 w1"
    expect(answer).to_contain_text("7 tokens")
    expect(chat.tokens(answer)).to_have_count(4)
    for i, kept in ((2, []), (3, [1])):
        other = go_on(chat, i, "w2").say(" end").end()
        assert other.body["prompt"] == [prompt + "a 🎉", *kept, 2]
        answer = chat.finished()
        assert chat.copied(answer) == "a 🎉" + " w1" * len(kept) + " w2 end"
        chat.button("Previous version", answer).click()


# -- another candidate ------------------------------------------------------------------------------------------------


def test_a_branch_is_what_the_server_says_behind_those_tokens(chat: Chat, served: Server) -> None:
    answer = chat.ask("Hello")
    whole = told(served, "Hello")
    i, ids = 5, whole["tokens"]
    other = next(option for option in whole["completion_probabilities"][i]["top_logprobs"] if option["id"] != ids[i])
    dialog = chat.open_token(chat.tokens(answer).nth(i))
    assert dialog.get_by_role("button", name=re.compile("^Go on with")).count() == len(table(dialog)) - 1
    dialog.get_by_role("button", name=f"Go on with {other['token'].strip()}", exact=True).first.click()
    answer = chat.finished()
    expect(answer).to_contain_text("2 of 2")
    said = chat.copied(answer)
    kept = "".join(entry["token"] for entry in whole["completion_probabilities"][:i]) + other["token"]
    rest = complete(served, [prompt_of(served, "Hello"), *ids[:i], other["id"]])["content"]
    assert len(said) > len(kept) and (kept + rest).startswith(said)


def test_a_branch_asks_for_its_tokens_and_is_drawn_as_its_answer_was(chat: Chat, script: Script) -> None:
    """Whatever is set by then: sampling, system message, PCD."""
    chat.set(temperature=0.3, top_p=0.6, seed=7, system_message="Be brief.")
    chat.pcd("^window")
    chat.told(*(event(f" w{n}", n, top_logprobs=candidates(1, 2, 3)) for n in (1, 2, 1)))
    before = script.streams[0].body
    chat.set(temperature=0.9, top_p=0.1, seed=8, system_message="Be long.")
    chat.pcd("^off")
    stream = go_on(chat, 1, "w3").say(" end").end()
    for name in ("temperature", "top_p", "seed", "pcd", "model"):
        assert stream.body[name] == before[name], name
    assert stream.body["prompt"] == [before["prompt"], 1, 3]
    answer = chat.finished()
    assert chat.copied(answer) == " w1 w3 end"
    # what stays, and the token that was chosen by hand, can be opened too
    tokens = chat.tokens(answer)
    expect(tokens).to_have_count(3)
    assert len(table(chat.open_token(tokens.nth(1)))) == 3


@pytest.mark.parametrize("contrasted", [False, True])
def test_a_branch_keeps_what_an_answers_first_token_decided(chat: Chat, script: Script, contrasted: bool) -> None:
    """min_first_entropy: the twin of the first token may be made before it is known that none is needed."""
    chat.pcd("^unsure")
    stream = chat.begin()
    counts = {"pcd_twins": 3, "pcd_contrasted": 2} if contrasted else {"pcd_twins": 1, "pcd_contrasted": 0}
    stream.say(*(event(" w1", 1, top_logprobs=candidates(1, 2)) for _ in range(3))).end(**counts)
    chat.finished()
    assert stream.body["pcd"]["min_first_entropy"] > 0
    other = go_on(chat, 1, "w2").say(" end").end()
    assert other.body["pcd"] == ({**stream.body["pcd"], "min_first_entropy": 0} if contrasted else False)


# -- the comparison ---------------------------------------------------------------------------------------------------


def telling(server: Server) -> tuple[str, str, str]:
    """A question that is answered in another way with PCD, and the two answers."""
    for seed in range(40):
        text, right = question(24, seed)
        plain, contrasted = (told(server, text, pcd=pcd)["content"] for pcd in (False, True))
        if plain != contrasted and right in contrasted:
            return text, plain, contrasted
    raise AssertionError("no question shows a difference")


def test_compare(chat: Chat, served: Server) -> None:
    text, plain, contrasted = telling(served)
    group = chat.compare(text)
    sides = {name: group.get_by_role("article", name=re.compile(f"^{name}")) for name in ("Without PCD", "With PCD")}
    for side in sides.values():
        expect(side).to_be_visible()
        expect(side).not_to_have_attribute("aria-busy", "true")
    expect(chat.button("Send")).to_be_visible()
    texts = {name: chat.copied(side) for name, side in sides.items()}
    assert texts == {"Without PCD": plain, "With PCD": contrasted}
    expect(sides["With PCD"]).to_contain_text(re.compile(r"PCD \(paper\) changed [1-9]"))
    chat.button("Go on with this", sides["With PCD"]).click()
    expect(group).to_have_count(0)
    assert chat.copied(chat.answers) == contrasted
    more = chat.copied(chat.ask("More"))
    assert more == told(served, text, contrasted, "More")["content"]


def test_compare_reads_its_prompt_once_and_tells_no_speed(chat: Chat, served: Server) -> None:
    text, _ = question(30, 101)
    n_tokens = told(served, text, n_predict=1, pcd=False)["tokens_evaluated"]
    complete(served, "Something else", n_predict=1)
    before = counter(served, "prompt_tokens_total")
    group = chat.compare(question(30, 102)[0])  # as long, and in no cache
    expect(group.get_by_role("article")).to_have_count(2)
    expect(chat.button("Send")).to_be_visible()
    assert 0.9 * n_tokens < counter(served, "prompt_tokens_total") - before < 1.3 * n_tokens
    assert re.findall(r"\d+ tokens", group.inner_text()) and "per second" not in group.inner_text()
    chat.button("Go on with this", group).first.click()
    expect(chat.answers).to_contain_text("per second")


def test_stop_ends_both_sides(chat: Chat, script: Script) -> None:
    chat.compare("Say")
    stream = script.next(chat).say("half")  # the first side, which is plain
    expect(chat.page.get_by_text("half")).to_be_visible()
    chat.button("Stop").click()
    chat.until(stream.is_left.is_set)
    expect(chat.button("Send")).to_be_visible()
    assert len(script.streams) == 1  # what was not asked for yet is not
    expect(chat.page.get_by_text("half")).to_be_visible()


def test_both_sides_are_asked_for_alike_and_one_may_fail(chat: Chat, script: Script) -> None:
    chat.compare("Say")
    plain = script.next(chat)
    plain.fail(400, b'{"error": {"code": 400, "message": "No room.", "type": "x"}}')
    chat.watch.allow("the server responded with a status of 400")
    contrasted = script.next(chat).say("whole").end()
    expect(chat.alert).to_contain_text("No room.")
    expect(chat.button("Send")).to_be_visible()
    expect(chat.page.get_by_text("whole")).to_be_visible()
    assert plain.body["pcd"] is False and contrasted.body["pcd"]
    for name in ("prompt", "seed", "model"):
        assert plain.body[name] == contrasted.body[name]
