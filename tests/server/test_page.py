"""The page in Chromium: the talk. Answers against the server's own, streaming, stop, edit, retry, errors, the key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
from browser import ENDLESS, Chat, Open, Script, event, expect, prompt_of, serve
from serving import ask, complete, meant

from pypcd.server import Server

# -- answers ----------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_server_turn_by_turn_and_to_an_edited_question(chat: Chat, served: Server) -> None:
    texts: list[str] = []
    for text in ("Hello", "2ac0-51f3 and what?"):
        texts.append(text)
        said = chat.copied(chat.ask(text))
        assert said == complete(served, prompt_of(served, *texts))["content"]
        texts.append(said)
    assert [chat.copied(one) for one in chat.questions.all()] == texts[::2]
    assert [chat.copied(one) for one in chat.answers.all()] == texts[1::2]
    field = chat.edit(chat.questions.first)
    expect(field).to_have_value("Hello")
    chat.button("Cancel").click()
    expect(field).to_have_count(0)
    expect(chat.answers).to_have_count(2)
    chat.edit(chat.questions.first).fill("Three")
    chat.button("Send again").click()
    expect(chat.answers).to_have_count(1)
    said = chat.copied(chat.finished())
    assert chat.copied(chat.questions) == "Three"
    assert said == complete(served, prompt_of(served, "Three"))["content"]


def test_an_answer_appears_as_it_comes(chat: Chat, script: Script) -> None:
    chat.send("Tell me")
    expect(chat.questions).to_contain_text("Tell me")
    expect(chat.answers).to_have_attribute("aria-busy", "true")
    expect(chat.message).to_have_value("")
    stream = script.next(chat).say("One", " and", " two")
    expect(chat.answers).to_contain_text("One and two")
    expect(chat.answers).to_have_attribute("aria-busy", "true")
    data = b"data: " + json.dumps(event(" Zoë 🎉"), ensure_ascii=False).encode() + b"\r\n\r\n"
    stream.say(" **bo", "ld**", *(data[i : i + 1] for i in range(len(data)))).end()  # events may be cut anywhere
    answer = chat.finished()
    expect(answer.locator("strong")).to_have_text("bold")
    assert chat.copied(answer) == "One and two **bold** Zoë 🎉"
    expect(chat.retold()).to_contain_text("the model ended at once")


PAGE = "document.documentElement"
LINES = [f"Row {n}\n\n" for n in range(30)]  # higher than any window here


def test_the_page_follows_the_talk_until_one_scrolls_up(open_page: Open, script: Script) -> None:
    chat = open_page(script=script, width=360)

    def below() -> float:
        return chat.page.evaluate(f"{PAGE}.scrollHeight - {PAGE}.clientHeight - {PAGE}.scrollTop")

    def sees(text: str) -> None:
        """It is in the window, and not behind the message box."""
        line = chat.page.get_by_role("main").get_by_text(text, exact=True)
        expect(line).to_be_in_viewport()
        assert line.bounding_box()["y"] + 20 < chat.message.bounding_box()["y"]  # type: ignore[index]

    chat.told(*LINES, text="Question 0")
    chat.until(lambda: below() < 2)
    chat.page.evaluate("scrollTo(0, 0)")  # where one was reading does not matter
    stream = chat.begin("Question 1")
    sees("Question 1")
    stream.say(*LINES)
    expect(chat.answers.last.get_by_text("Row 29", exact=True)).to_be_in_viewport()
    chat.until(lambda: below() < 2)
    chat.page.mouse.move(180, 300)
    chat.page.mouse.wheel(0, -60)
    chat.until(lambda: below() > 30)
    place = chat.page.evaluate(f"{PAGE}.scrollTop")
    stream.say(*LINES[:10])
    chat.until(lambda: below() > 300)
    assert chat.page.evaluate(f"{PAGE}.scrollTop") == place  # who reads above is left there
    chat.page.mouse.wheel(0, 10_000)
    chat.until(lambda: below() < 2)
    stream.say("The very last line.").end()
    chat.finished()
    sees("The very last line.")


def test_what_sends_and_what_does_not(chat: Chat, script: Script) -> None:
    chat.message.press_sequentially("one")
    chat.message.press("Shift+Enter")
    chat.message.press_sequentially("two")
    assert not script.streams
    chat.button("Send").click()
    script.next(chat).end()
    chat.finished()
    assert chat.copied(chat.questions) == "one\ntwo"
    chat.send("   \n ")  # nothing is written
    chat.told("x")
    assert len(script.streams) == 2 == chat.answers.count()


def test_a_model_that_is_being_loaded_is_waited_for(open_page: Open) -> None:
    chat = open_page(greedy=False)
    left = [ERROR] * 2

    def refuse(route: Any) -> None:
        if left:
            route.fulfill(status=503, body=left.pop(), content_type="application/json")
        else:
            route.continue_()

    chat.page.context.route("**/v1/models", refuse)
    chat.watch.allow("the server responded with a status of 503")
    chat.go()
    expect(chat.alert).to_have_count(0)
    expect(chat.named("combobox", "Model").locator("option")).to_have_text("demo")
    assert not left


# -- what is asked for, and what the server tells ---------------------------------------------------------------------


def asked(chat: Chat, text: str = "Say") -> dict[str, Any]:
    """What the page sends for a question."""
    chat.told("x", text=text)
    return chat.script.streams[-1].body


SAMPLING = {"temperature": 0.33, "top_k": 7, "top_p": 0.975, "min_p": 0.125, "repeat_penalty": 1.25}


def test_settings_reach_the_server_and_a_number_out_of_range_stays_to_be_mended(
    chat: Chat, script: Script, served: Server
) -> None:
    dialog = chat.settings()
    dialog.get_by_label("Top p").fill("7")
    chat.button("Done", dialog).click()
    expect(dialog.get_by_label("Top p")).to_have_value("7")
    dialog.get_by_label("Top p").fill("0.5")
    chat.done(dialog)
    chat.set(**SAMPLING, longest_answer=17, seed=42, system_message="Be brief.", stop_at="\n\nUser:\nEND")
    body = asked(chat, "Why?")
    wanted = {**SAMPLING, "n_predict": 17, "seed": 42, "stop": ["User:", "END"], "stream": True}
    assert {name: body[name] for name in wanted} == wanted
    assert body["prompt"] == prompt_of(served, "Why?", system="Be brief.")
    assert body["n_probs"] > 0


def test_what_is_not_set_is_the_servers(chat: Chat, script: Script) -> None:
    dialog = chat.settings()
    own = ask(chat.server, "/props")[1]["default_generation_settings"]["params"]
    for name in SAMPLING:
        field = dialog.get_by_label(re.compile(f"^{name.capitalize().replace('_', ' ')}"))
        assert float(field.get_attribute("placeholder") or "nan") == pytest.approx(own[name], rel=1e-3)
        expect(field).to_have_value("")
    chat.done(dialog)
    assert not {*SAMPLING, "stop"} & set(asked(chat))
    chat.set(temperature=0.5)
    chat.set(temperature="")
    assert "temperature" not in asked(chat)


def test_what_is_typed_into_the_settings_stays_while_an_answer_is_written(chat: Chat, script: Script) -> None:
    stream = chat.begin()
    dialog = chat.settings()
    field = dialog.get_by_label("System message")
    field.press_sequentially("Be ")
    stream.say(" word").end()
    expect(chat.answers).to_contain_text("word")  # the page was drawn anew
    field.press_sequentially("brief.")
    chat.done(dialog)
    chat.finished()
    assert "Be brief." in asked(chat)["prompt"]


def test_the_pcd_of_an_answer_is_chosen_among_all_presets_that_run(chat: Chat, script: Script, served: Server) -> None:
    dialog = chat.pcd_dialog()
    presets = ask(served, "/props")[1]["pcd"]["presets"]
    labels = chat.choices(dialog)
    assert sorted(label[0] for label in labels) == sorted(["the server's (paper)", "off", *presets, "custom"])
    assert all(len("".join(about)) > 10 for _, *about in labels), "each has a line of what it does"
    chat.done(dialog)
    for label, wanted in (("^off", False), ("^unsure", "unsure"), ("^window", "window"), ("server's", None)):
        chat.pcd(label)
        assert meant(served, pcd=asked(chat).get("pcd")) == meant(served, pcd=wanted), label


def test_custom_opens_every_field_that_a_request_may_change_where_it_is_chosen(
    chat: Chat, script: Script, served: Server
) -> None:
    chat.pcd("^unsure")
    dialog = chat.pcd_dialog()
    about = ask(served, "/props")[1]["pcd"]
    names, unsure = about["per_request"], about["presets"]["unsure"]
    fields = [dialog.get_by_label(re.compile(rf"^{name.capitalize()}$|\({name}\)")) for name in names]
    for field in fields:
        expect(field).to_have_count(0)
    dialog.get_by_role("radio", name=re.compile("^custom")).check()
    for field in fields:
        expect(field).to_be_visible()
    chat.done(dialog)
    assert chat.page.get_by_role("button", name="PCD: custom").is_visible()  # it begins as what was chosen before
    assert asked(chat)["pcd"] == unsure
    values = {"beta": 0.5, "gamma": 8, "relative_top": 0.25, "perturbation": "none", "window": 32, "n_sink": 1}
    values.update(min_context=50, min_entropy=0.5, min_first_entropy=1.5)
    assert set(values) == set(names)
    chat.pcd("^custom", **values)
    assert asked(chat)["pcd"] == values
    meant(served, pcd=values)  # and the server takes it
    chat.pcd("^custom", perturbation="over-rotation", window=0)
    values.update(perturbation="over-rotation", window=None)
    assert asked(chat)["pcd"] == values
    meant(served, pcd=values)
    chat.pcd("^window")
    chat.pcd("^custom", beta="")  # it keeps what was typed
    assert asked(chat)["pcd"] == {**values, "beta": unsure["beta"]}


def test_where_the_server_is_off_it_offers_that_once_and_begins_with_the_recommended_preset(
    open_page: Open, script: Script
) -> None:
    with serve(pcd=False, parallel=1) as server:
        chat = open_page(server, script)
        dialog = chat.pcd_dialog()
        assert [label for label, *_ in chat.choices(dialog) if "off" in label] == ["the server's (off)"]
        chat.done(dialog)
        assert asked(chat)["pcd"] is False
        chat.compare("Say")
        compared = [script.next(chat).end().body["pcd"] for _ in range(2)]
        chat.finished()
        chat.button("Go on with this").first.click()
        chat.pcd("^custom")
        props = ask(server, "/props")[1]["pcd"]
        recommended = props["presets"][props["recommended"]]
        assert asked(chat)["pcd"] == recommended
        assert compared == [False, recommended]


def test_what_the_server_tells_of_an_answer_is_told_and_kept(chat: Chat, script: Script) -> None:
    for field, said in (
        ("documents_note", "a.pdf: pictures are left out"),
        ("passages_note", "the document has fewer tokens than the passages"),
        ("pcd_answer", "PCD (window) left this answer alone: the text has fewer than 300 tokens"),
    ):
        chat.begin().say("x").end(passages=[], pcd_twins=0, **{field: said})
        expect(chat.finished()).to_contain_text(said)
    chat.go()
    expect(chat.answers.last).to_contain_text(said)


# -- stop, retry ------------------------------------------------------------------------------------------------------


def test_stop_ends_the_request_and_escape_in_an_edited_message_does_not(chat: Chat, script: Script) -> None:
    stream = chat.begin("Hello").say("half an")
    expect(chat.answers.last).to_contain_text("half an")
    chat.page.keyboard.press("Escape")
    answer = chat.finished()
    chat.until(stream.is_left.is_set)
    expect(chat.message).to_be_focused()
    assert chat.copied(answer) == "half an"
    expect(answer).to_contain_text("stopped")
    expect(chat.alert).to_have_count(0)
    stream = chat.begin("More").say("half")
    field = chat.edit(chat.questions.first)
    field.press("Escape")
    expect(field).to_have_count(0)
    stream.say(" whole").end()
    assert chat.copied(chat.finished()) == "half whole"


def test_versions(chat: Chat, script: Script) -> None:
    chat.told("first")
    expect(chat.button("Next version")).to_have_count(0)
    for n, word in enumerate(("second", "third"), start=2):
        expect(chat.retold(word)).to_contain_text(f"{n} of {n}")
        assert chat.copied(chat.answers) == word
    assert script.streams[0].body["prompt"] == script.streams[2].body["prompt"]
    chat.button("Previous version").click()
    expect(chat.answers).to_contain_text("2 of 3")
    assert chat.copied(chat.answers) == "second"
    chat.button("Previous version").click()
    assert chat.copied(chat.answers) == "first"
    expect(chat.button("Previous version")).to_be_disabled()
    assert "first" in asked(chat, "More")["prompt"]  # the talk goes on from the version that is seen


# -- errors and the key -----------------------------------------------------------------------------------------------


ERROR = json.dumps({"error": {"code": 500, "message": "The cat sat on the keys.", "type": "server_error"}}).encode()
ODD = [{"id": "x", "top_logprobs": 7, "pcd": []}, None]
BROKEN: dict[str, tuple[Callable[[Script.Stream], Any], str]] = {
    "status": (lambda stream: stream.fail(500, ERROR), "The cat sat on the keys"),
    "no JSON": (lambda stream: stream.fail(502, b"<html><h1>Bad gateway</h1></html>"), "Bad gateway|502"),
    "event": (lambda stream: stream.say(b"data: " + ERROR + b"\n\n").just_end(), "The cat sat on the keys"),
    "malformed": (lambda stream: stream.say(b'data: {"content": "ha\n\n').just_end(), "."),
    "not what a token is": (lambda stream: stream.say({"completion_probabilities": ODD}).just_end(), "."),
    "no end": (lambda stream: stream.just_end(), "broke off"),
    "broken off": (lambda stream: stream.break_off(), "."),
}


def test_an_error_is_told_and_the_next_answer_comes(chat: Chat, script: Script) -> None:
    chat.watch.allow("the server responded with a status of 50[02]", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    for how, (end, told) in BROKEN.items():
        has_begun = how not in ("status", "no JSON")
        stream = chat.begin()
        if has_begun:
            stream.say("half an")
            expect(chat.answers.last).to_contain_text("half an")  # it has come before the end does
        end(stream)
        expect(chat.alert).to_contain_text(re.compile(told))
        assert not re.search("undefined|JSON|null|not a function", chat.alert.inner_text()), "no sentence"
        expect(chat.button("Send")).to_be_visible()
        if has_begun:
            expect(chat.answers.last).to_contain_text("half an")
        expect(chat.told("whole", text="Again")).to_contain_text("whole")
        expect(chat.alert).to_have_count(0)
        chat.new()


def test_a_question_that_is_too_long_is_told(chat: Chat) -> None:
    chat.set(longest_answer=4)
    n_ctx = ask(chat.server, "/props")[1]["default_generation_settings"]["n_ctx"]
    chat.send("7 " * 1900)
    expect(chat.alert).to_contain_text(f"the context has {n_ctx:,}")
    expect(chat.questions).to_have_count(0)
    expect(chat.message).to_have_value("7 " * 1900)  # nothing is lost


def test_an_answer_that_fills_the_context_says_so(open_page: Open) -> None:
    with serve(*ENDLESS, "--ctx-size", "256", parallel=1) as server:
        chat = open_page(server)
        n_ctx = ask(server, "/props")[1]["default_generation_settings"]["n_ctx"]
        chat.set(longest_answer=n_ctx + 100)
        expect(chat.ask("7 " * ((n_ctx - 40) // 2))).to_contain_text("the context is full")
        expect(chat.button("Continue")).to_have_count(0)


def test_a_server_that_is_gone_is_told(open_page: Open) -> None:
    with serve(parallel=1) as server:
        chat = open_page(server)
        chat.ask("Hello")
    chat.send("Is there anybody?")
    expect(chat.alert).to_contain_text("does not answer")
    expect(chat.message).to_have_value("Is there anybody?")
    chat.watch.allow("Failed to load resource: net::ERR_CONNECTION_REFUSED")


def test_a_key_is_asked_for_and_kept_out_of_what_is_saved(open_page: Open, tmp_path: Any) -> None:
    if os.environ.get("PYPCD_PAGE"):
        pytest.skip("from a folder the page itself needs the key: unset PYPCD_PAGE")
    with serve(parallel=1, api_key="open-sesame") as server:
        chat = open_page(server, greedy=False)
        chat.watch.allow("the server responded with a status of 401")
        expect(chat.alert).to_contain_text("API key")
        chat.set(api_key="open-sesame", longest_answer=8)
        expect(chat.named("combobox", "Model").locator("option").first).to_have_text("demo")
        chat.ask("Hello")
        expect(chat.alert).to_have_count(0)
        text = json.dumps(chat.exported(tmp_path / "talk.json"))
        assert "Hello" in text and "sesame" not in text
        assert "sesame" not in chat.page.evaluate("JSON.stringify(localStorage)") + chat.page.url
