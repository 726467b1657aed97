"""The page in Chromium: files, long pastes, how much room there is; conversations that are kept, exported and imported."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import Chat, Open, Script, expect, question
from documents import pdf
from playwright.sync_api import Locator
from serving import answered, ask, complete, counter, events

from pypcd.server import Server

CHAT = "/v1/chat/completions"


def paste(chat: Chat, text: str) -> None:
    chat.message.focus()
    chat.page.evaluate("text => navigator.clipboard.writeText(text)", text)
    chat.page.keyboard.press("ControlOrMeta+v")


# -- long texts -------------------------------------------------------------------------------------------------------


N_LONG = 164  # the pairs of a question of nearly 2,000 tokens


def test_a_short_paste_stays_text_and_a_long_one_becomes_a_file_of_2000_tokens(chat: Chat, served: Server) -> None:
    text, _ = question(N_LONG)
    assert 1900 < complete(served, text, n_predict=1)["tokens_evaluated"] <= 2000
    paste(chat, "short")
    expect(chat.message).to_have_value("short")
    paste(chat, text)
    expect(chat.removers()).to_have_count(1)
    expect(chat.message).to_have_value("short")
    n_ctx = ask(served, "/props")[1]["default_generation_settings"]["n_ctx"]
    room = chat.page.get_by_text(re.compile(rf"^\s*[\d,]+ of {n_ctx:,} tokens"))
    expect(room).to_be_visible()
    chat.set(longest_answer=12)
    chat.button("Send").click()
    said = chat.copied(chat.finished())
    # what was asked is what the server was given: its own answer to that prompt is the same
    file_name = re.search(r"pasted-\d+\.txt", chat.questions.inner_text())
    assert file_name
    file = {"filename": file_name[0], "file_data": base64.b64encode(text.encode()).decode()}
    parts = [{"type": "file", "file": file}, {"type": "text", "text": "short"}]
    wanted = answered(served, CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 12})
    assert said == wanted["choices"][0]["message"]["content"]
    used = int(re.sub(",", "", room.inner_text().split()[0]))
    assert abs(used - wanted["usage"]["total_tokens"]) <= 2


def test_progress_of_reading(chat: Chat, script: Script) -> None:
    """The server reports after each batch."""
    bar = chat.named("progressbar", "Reading")

    def reports(stream: Script.Stream, total: int, done: int = 0, cached: int = 0) -> Script.Stream:
        time_ms = 20 * (done - cached)  # 50 tokens per second
        report = {"total": total, "cache": cached, "processed": done, "time_ms": time_ms}
        return stream.say({"content": "", "tokens": [], "stop": False, "prompt_progress": report})

    stream = reports(chat.begin(), 200_000)
    expect(chat.answers).to_contain_text("reading 200,000 tokens")
    assert bar.evaluate("bar => bar.position") == -1  # its speed is not known: it moves without an end
    for done, left in ((10_000, 3800), (50_000, 3000)):
        reports(stream, 200_000, done)
        expect(chat.answers).to_contain_text(f"about {left} s left")
        assert bar.evaluate("bar => bar.position") == done / 200_000
    reports(stream, 200_000, 199_000, cached=198_000)
    expect(chat.answers).to_contain_text("about 20 s left")
    # of what is not in memory: a document's text is, once passages were found
    assert bar.evaluate("bar => bar.position") == 0.5
    stream.say("x").end()
    chat.finished()
    expect(bar).to_have_count(0)


def test_the_server_reports_reading_as_the_script_does(served: Server) -> None:
    body = {"prompt": question(N_LONG)[0], "n_predict": 1, "stream": True, "return_progress": True}
    text = answered(served, "/completion", {**body, "cache_prompt": False})
    reports = [part["prompt_progress"] for part in events(text) if "prompt_progress" in part]
    for report in reports:
        assert set(report) == {"total", "cache", "processed", "time_ms"}
    assert sum(0 < report["processed"] < report["total"] for report in reports) >= 3  # so that the bar moves


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_dropped_attached_removed_and_taken_out_of_a_question(chat: Chat, tmp_path: Path) -> None:
    asked = chat.sent(CHAT)
    hostile = "<img src=x onerror=window.ran=1>" + "x" * 300 + ".txt"
    texts = {"one.txt": "first file", hostile: "</textarea>\u202e", "three.csv": "a,b\n1,2"}
    chat.drop(*((name, "text/plain", texts[name]) for name in ("one.txt", hostile)), ("no.py", "", "x()"))
    expect(chat.removers()).to_have_count(3)
    chat.button("Remove no.py").click()
    (tmp_path / "three.csv").write_text(texts["three.csv"])
    chat.choose("Attach files", tmp_path / "three.csv")
    expect(chat.removers()).to_have_count(3)
    assert chat.widest() == 0
    chat.set(longest_answer=2)
    chat.ask("What is in them?")
    (*files, text) = asked[-1]["messages"][0]["content"]
    assert {part["file"]["filename"]: part["file"]["text"].strip() for part in files} == texts
    assert text == {"type": "text", "text": "What is in them?"}
    for name in texts:
        expect(chat.questions).to_contain_text(name)
    assert not chat.questions.locator("img").count() and chat.widest() == 0
    expect(chat.removers()).to_have_count(0)
    chat.edit(chat.questions)
    chat.button("Remove one.txt", chat.questions).click()
    expect(chat.removers()).to_have_count(2)
    chat.button("Send again").click()
    chat.until(lambda: len(asked) == 2)
    chat.finished()
    assert [part["file"]["filename"] for part in asked[1]["messages"][0]["content"][:-1]] == [hostile, "three.csv"]
    chat.button("Previous version", chat.questions).click()
    expect(chat.questions).to_contain_text("one.txt")  # the other version has it still


def test_a_document_is_read_by_the_server_and_sent_as_a_file(chat: Chat, served: Server, tmp_path: Path) -> None:
    asked = chat.sent(CHAT)
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 and nothing that a PDF has")
    (tmp_path / "picture.png").write_bytes(bytes(range(256)) * 20)
    chat.watch.allow("status of 400")
    for name, said in (("bad.pdf", "bad.pdf cannot be read as a PDF"), ("picture.png", "picture.png")):
        chat.choose("Attach files", tmp_path / name)
        expect(chat.alert).to_contain_text(said)
        expect(chat.removers()).to_have_count(0)
    pages = ["The bridge was opened in 1931.", "Signed by Ruth Amsel.", "It has nine arches."]
    (tmp_path / "report.pdf").write_bytes(pdf(*pages))
    chat.choose("Attach files", tmp_path / "report.pdf")
    file = {"filename": "report.pdf", "file_data": base64.b64encode(pdf(*pages)).decode()}
    read = answered(served, "/documents", file)
    assert [part.strip() for part in read["text"].split("\n\n")] == pages
    expect(chat.page.get_by_text(f"report.pdf ({read['n_tokens']} tokens)")).to_be_visible()
    said = chat.ask("Who signed it?")
    expect(said).to_contain_text(re.compile(r"[12] passages?.*report.pdf, page [12]", re.DOTALL))
    (message,) = asked[0]["messages"]
    sent, text = message["content"]
    assert sent["type"] == "file" and sent["file"]["filename"] == "report.pdf" and text["text"] == "Who signed it?"
    assert sent["file"]["text"] == read["text"] and sent["file"]["pages"] == read["pages"] and len(read["pages"]) == 3
    assert sent["file"]["unit"] == read["unit"] == "page" and sent["file"]["note"] == read["note"]
    assert asked[0]["temperature"] == 0 and asked[0]["max_tokens"] == 24 and "pcd" in asked[0]
    chat.go()  # what was read is kept
    chat.ask("And?")
    assert [one["role"] for one in asked[1]["messages"]] == ["user", "assistant", "user"]
    assert asked[1]["messages"][0]["content"] == message["content"]


def read(text: str) -> dict[str, Any]:
    return {"name": "x", "text": text, "n_tokens": 3}


def test_a_message_waits_for_its_files(chat: Chat, script: Script) -> None:
    """Who presses Enter while a file is being read sends it with the file; or nothing, if it cannot be read."""
    reading: list[Any] = []
    asked = chat.sent(CHAT)
    chat.page.context.route("**/documents", lambda route: reading.append(route))
    chat.page.context.route("**/v1/chat/completions", lambda route: route.abort())
    chat.watch.allow("status of 400", "ERR_FAILED")
    chat.drop(("bad.pdf", "application/pdf", "x"), ("good.pdf", "application/pdf", "y"))
    chat.send("Who?")
    for answer in ({"status": 400, "json": {"error": {"message": "it is damaged"}}}, {"json": read("Zoë has 2.")}):
        chat.until(lambda: reading)
        reading.pop(0).fulfill(**answer)
    expect(chat.alert).to_contain_text("it is damaged")
    expect(chat.button("Remove good.pdf")).to_be_visible()  # the others are there
    assert not chat.questions.count() and chat.message.input_value() == "Who?"
    chat.drop(("slow.pdf", "application/pdf", "z"))
    chat.message.press("Enter")
    chat.until(lambda: reading)
    assert not chat.questions.count() and not asked
    reading.pop(0).fulfill(json=read("Ada has 3."))
    chat.until(lambda: asked)
    parts = asked[0]["messages"][0]["content"]
    assert [part["file"]["filename"] for part in parts if part["type"] == "file"] == ["good.pdf", "slow.pdf"]


def clauses(n: int) -> list[str]:
    return [f"Clause {i} \U0001f309 <b>: the bridge over river {i} has {i * 7} arches." for i in range(n)]


def passages_in(answer: Locator) -> Locator:
    """The passages of an answer, opened."""
    expect(answer.locator("blockquote").first).to_be_hidden()
    answer.get_by_text(re.compile(r"^\d passages?$")).click()
    return answer.locator("blockquote")


def with_passages(chat: Chat, texts: list[str], where: str, *wanted: str) -> Locator:
    """Asks about files of one name with these texts; the answer has the wanted passages, where they stand in a text."""
    for i, text in enumerate(texts, 1):
        chat.drop(("report.txt", "text/plain", text))
        expect(chat.removers()).to_have_count(i)
    passages = []
    for n, one in enumerate(wanted):  # as the server tells them: with the offsets that Python counts
        begin = where.index(one)
        about = {"text": one, "document": "report.txt", "place": f"line {n}"}
        passages.append({**about, "begin": begin, "end": begin + len(one)})
    chat.begin("Who?").say("So.").end(passages=passages)
    answer = chat.finished()
    passages_in(answer)
    return answer


@pytest.mark.parametrize("width", [1280, 400])
def test_a_passage_opens_its_text_and_is_marked_there(open_page: Open, script: Script, width: int) -> None:
    chat = open_page(script=script, width=width)
    lines = clauses(400)
    text = "\n\n".join(lines)
    wanted = lines[300], "\n\n".join(lines[100:160])  # the second is of several pieces of the page's
    answer = with_passages(chat, ["\n\n".join(lines[::-1]), text], text, *wanted)
    dialog = chat.named("dialog", "Document")
    for i, passage in enumerate(wanted):
        opener = chat.button(f"report.txt, line {i}", answer)
        opener.focus()
        chat.page.keyboard.press("Enter")
        expect(dialog).to_be_visible()
        marks = dialog.locator("mark")
        assert "".join(marks.all_text_contents()) == passage
        assert dialog.locator("mark b").count() == 0
        expect(marks.first).to_be_in_viewport()
        beginning, heading = (one.bounding_box() or {} for one in (marks.first, dialog.get_by_role("heading")))
        assert heading["y"] + heading["height"] <= beginning["y"] < 700
        assert "".join(dialog.locator(".document > div").all_text_contents()) == text
        assert chat.widest() == 0 and chat.axe() == []
        # how far the dialog is scrolled depends on what is laid out: the mark goes down
        chat.page.keyboard.press("PageUp")
        chat.until(lambda mark=marks.first, at=beginning: (mark.bounding_box() or at)["y"] > at["y"] + 100)
        chat.page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(opener).to_be_focused()
    answer.get_by_text(wanted[0], exact=True).click()
    expect(dialog.locator("mark")).to_have_text(wanted[0])
    chat.button("Close", dialog).click()
    expect(dialog).to_be_hidden()
    chat.button("report.txt", chat.questions).last.click()  # the file itself opens too, at its beginning
    expect(dialog).to_contain_text(lines[-1])
    expect(dialog.locator("mark")).to_have_count(0)
    assert dialog.evaluate("dialog => dialog.scrollTop") == 0
    chat.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_the_servers_passages_stand_where_it_says_and_the_page_goes_on_from_its_prompt(
    chat: Chat, served: Server
) -> None:
    """What it asks of /completion is what the server has in its slot, so that next to nothing is read anew."""
    chat.drop(("report.txt", "text/plain", "\r\n\r\n".join(clauses(12))))
    answer = chat.ask("How many arches has river 4?")
    shown = passages_in(answer).all_inner_texts()
    assert any(clauses(12)[4] in one for one in shown)
    for i, passage in enumerate(shown):
        dialog = chat.opened(answer.get_by_role("figure").nth(i).get_by_role("button"), "Document")
        marked = "".join(dialog.locator("mark").all_text_contents())
        assert marked.split() == passage.split()
        chat.button("Close", dialog).click()
    expect(answer).to_contain_text(re.compile(r"passages?.*report.txt, lines? \d", re.DOTALL))
    read, written = (counter(served, f"{name}_total") for name in ("prompt_tokens", "tokens_predicted"))
    chat.button("Continue").click()
    chat.until(lambda: counter(served, "tokens_predicted_total") > written)
    chat.finished()
    assert counter(served, "prompt_tokens_total") - read <= 8


def test_parts_of_a_long_file_are_read_and_that_is_said(chat: Chat, served: Server) -> None:
    lines = clauses(ask(served, "/props")[1]["default_generation_settings"]["n_ctx"] // 10)
    chat.drop(("report.txt", "text/plain", "\n\n".join(lines)))
    expect(chat.page.get_by_text("parts of the files will be read")).to_be_visible()
    answer = chat.ask("How many arches has river 44?")
    expect(answer.get_by_text(re.compile(rf"^Read \d+ of {len(lines)} parts\.$"))).to_be_visible()
    assert lines[44] in passages_in(answer).all_inner_texts()


# -- conversations ----------------------------------------------------------------------------------------------------


def test_a_talk_and_the_settings_are_there_again_after_a_reload(chat: Chat, script: Script) -> None:
    chat.talk(("First?", "one **two**"), ("Second?", "three"))
    chat.retold("four")
    chat.set(longest_answer=33)
    chat.pcd("^window")
    chat.go()
    expect(chat.page.get_by_role("button", name="PCD: window")).to_be_visible()
    expect(chat.answers).to_have_count(2)
    expect(chat.answers.first.locator("strong")).to_have_text("two")
    expect(chat.answers.last).to_contain_text("2 of 2")
    chat.button("Previous version").click()
    assert chat.copied(chat.answers.last) == "three"
    expect(chat.tokens(chat.answers.first)).to_have_count(2)
    chat.talk(("Third?", "five"))
    body = script.streams[-1].body
    assert "three" in body["prompt"] and (body["n_predict"], body["pcd"]["window"]) == (33, 64)


@pytest.fixture
def two_talks(chat: Chat, script: Script) -> Chat:
    """A page with two conversations, of which the second is open."""
    chat.talk(("About cats", "meow"))
    chat.new()
    expect(chat.answers).to_have_count(0)
    chat.talk(("About dogs", "woof"))
    assert "cats" not in script.streams[-1].body["prompt"]
    return chat


def test_conversations_are_made_found_deleted_and_put_back(two_talks: Chat) -> None:
    chat = two_talks
    for back in (True, False):
        chat.button("Delete About dogs", chat.menu()).click()
        expect(chat.button("About dogs", chat.menu())).to_have_count(0)
        expect(chat.answers).to_have_count(0)
        if back:
            chat.button("Undo", chat.menu()).click()
            expect(chat.button("Undo")).to_have_count(0)
            expect(chat.answers).to_contain_text("woof")
        chat.go()
        assert chat.titles() == ["About dogs", "About cats"][0 if back else 1 :]
    chat.button("About cats", chat.menu()).click()
    expect(chat.answers).to_contain_text("meow")


CHOSEN_AND_SENT = """() => {
  document.querySelector('button[title="About cats"]').click();
  const enter = new KeyboardEvent("keydown", {key: "Enter", bubbles: true, cancelable: true});
  document.getElementById("message").dispatchEvent(enter);
}"""


def test_what_is_sent_goes_to_the_conversation_that_was_chosen(two_talks: Chat, script: Script) -> None:
    """Though the browser has not read it yet: both are done in one task of the page."""
    two_talks.message.fill("More")
    two_talks.page.evaluate(CHOSEN_AND_SENT)
    prompt = script.next(two_talks).say("purr").end().body["prompt"]
    assert "meow" in prompt and "woof" not in prompt
    two_talks.finished()


def test_a_conversation_is_renamed_in_its_place(two_talks: Chat) -> None:
    chat = two_talks
    field = chat.named("textbox", "Title")
    for key, wanted in (("Escape", "About cats"), ("Enter", "Felines <b>")):
        chat.button("Rename About cats", chat.menu()).click()
        expect(field).to_be_focused()
        expect(field).to_have_value("About cats")
        field.fill("Felines <b>")
        field.press(key)
        expect(field).to_have_count(0)
        assert chat.titles() == ["About dogs", wanted]  # it keeps its place
        expect(chat.button(f"Rename {wanted}")).to_be_focused()
    chat.button("Rename About dogs", chat.menu()).click()
    field.fill("   ")
    chat.message.click()  # nothing is no name
    assert chat.titles() == ["About dogs", "Felines <b>"]
    chat.go()
    assert chat.titles() == ["About dogs", "Felines <b>"]


def test_conversations_are_searched_by_titles_and_texts(chat: Chat, script: Script) -> None:
    chat.drop(("lion.txt", "text/plain", "roar"))
    for said in (("About cats", "They say meow."), ("About dogs", "They say Woof.")):
        chat.talk(said)
        chat.new()
    field = chat.named("searchbox", "Search conversations")
    dogs, cats = "About dogs", "About cats"
    for text, wanted in (("MEOW", [cats]), ("say about", [dogs, cats]), ("lion", [cats]), ("", [dogs, cats])):
        field.fill(text)
        chat.until(lambda wanted=wanted: chat.titles() == wanted)
    field.fill("about meow woof")
    expect(chat.menu()).to_contain_text("Nothing was found")


def test_export_and_import_give_the_same_talk(chat: Chat, open_page: Open, script: Script, tmp_path: Path) -> None:
    with_passages(chat, ["one\n\ntwo"], "one\n\ntwo three", "two", "three")
    chat.talk(("And?", "meow `x` 🎉"))
    chat.new()
    chat.talk(("About dogs", "woof"))
    first = chat.exported(tmp_path / "talks.json")
    other = open_page()  # another browser, as it were
    other.load(tmp_path / "talks.json")
    other.button("Who?", other.menu()).click()
    expect(other.answers).to_have_count(2)
    assert [other.copied(one) for one in other.answers.all()] == ["So.", "meow `x` 🎉"]
    expect(other.questions.first).to_contain_text("report.txt")
    expect(other.tokens(other.answers.last)).to_have_count(3)
    passages_in(other.answers.first)
    dialog = other.opened(other.button("report.txt, line 0"), "Document")
    expect(dialog.locator("mark")).to_have_text("two")
    other.button("Close", dialog).click()
    other.button("report.txt, line 1").click()
    expect(other.alert).to_contain_text("report.txt is not in this conversation")
    second = other.exported(tmp_path / "again.json")

    def plain(file: dict[str, Any]) -> str:
        return json.dumps(sorted(json.dumps(one["messages"], sort_keys=True) for one in file["conversations"]))

    assert plain(first) == plain(second)
    assert [one["title"] for one in second["conversations"]] == ["About dogs", "Who?"], "in their order"
    other.load(tmp_path / "talks.json")  # a second time: nothing is doubled
    expect(other.button("Who?", other.menu())).to_have_count(1)


def test_an_answer_of_another_model_is_read_but_not_gone_on_with(open_page: Open, tmp_path: Path) -> None:
    """Its tokens are numbers, which mean others here."""
    chat = open_page()
    chat.set(longest_answer=4)
    chat.ask("Hello")
    file = chat.exported(tmp_path / "talks.json")
    assert file["conversations"][0]["messages"][1]["model"] == "demo"
    file["conversations"][0]["messages"][1]["model"] = "elsewhere"
    (tmp_path / "talks.json").write_text(json.dumps(file))
    other = open_page()
    other.load(tmp_path / "talks.json")
    other.button("Hello", other.menu()).click()
    dialog = other.open_token(other.tokens(other.answers).first)
    dialog.get_by_role("button", name=re.compile("^Go on with ")).first.click()
    expect(other.alert).to_contain_text("of the model elsewhere")
    expect(other.answers).to_have_count(1)


def test_an_import_is_taken_whole_or_not_at_all_and_does_no_harm(chat: Chat, script: Script, tmp_path: Path) -> None:
    chat.talk(("About cats", "meow"))
    file = chat.exported(tmp_path / "talks.json")
    good = file["conversations"][0]
    text = "<img src=x onerror=window.ran=1>"
    asked, said = good["messages"]

    def tampered(question: dict[str, Any], answer: dict[str, Any], **talk: Any) -> str:
        """The file with these fields in place of others."""
        messages = [{**asked, **question}, {**said, **answer}]
        copy = {**good, "id": "other", "title": "Tampered", "messages": messages, **talk}
        return json.dumps({**file, "conversations": [copy]})

    wrong = [
        *("{", "[]", '{"pypcd": 99, "conversations": []}'),
        tampered({"parent": said["id"]}, {}),  # a circle
        *(tampered({}, fields) for fields in ({"parent": "nobody"}, {"role": "system"}, {"tokens": 7})),
        tampered({"files": [{"name": "a", "text": "", "image": "http://example.com/x.png"}]}, {}),
        *(tampered({}, {}, **fields) for fields in ({"messages": None}, {"at": "nobody"})),
    ]
    for i, content in enumerate(wrong):
        path = tmp_path / f"wrong-{i}.json"
        path.write_text(content)
        chat.load(path)
        expect(chat.alert).to_contain_text(path.name)
    chat.go()
    assert chat.titles() == ["About cats"]
    expect(chat.answers).to_contain_text("meow")
    tokens = [{**token, "text": text} for token in said["tokens"]]
    path.write_text(tampered({}, {"text": text, "__proto__": {"ran": 1}, "tokens": tokens}, title=text))
    chat.load(path)
    chat.button(text, chat.menu()).click()
    expect(chat.answers).to_be_visible()
    chat.tokens(chat.answers)
    assert chat.page.evaluate("window.ran ?? null") is None
    assert not chat.page.locator("img").count()


# -- two pages --------------------------------------------------------------------------------------------------------


def test_two_pages_of_one_talk_lose_nothing(chat: Chat, script: Script, tmp_path: Path) -> None:
    chat.talk(("About cats", "meow"))
    one, two = chat, chat.again()
    expect(two.answers).to_have_count(1)
    one.send("From one")  # both at once
    first = script.next(one).say("first")
    two.send("From two")
    second = script.next(two).say("second")
    for page, stream, word in ((two, second, "second"), (one, first, "first")):
        expect(page.answers.last).to_contain_text(word)
        stream.end()
        page.finished()
        expect(page.answers).to_have_count(2)
    found = one.again().exported(tmp_path / "talks.json")
    texts = {message["text"] for talked in found["conversations"] for message in talked["messages"]}
    assert {"About cats", "meow", "From one", "first", "From two", "second"} <= texts


def test_an_answer_that_a_reload_cuts_off(chat: Chat, script: Script) -> None:
    stream = chat.begin("Say").say("half", " an")
    expect(chat.answers).to_contain_text("half an")
    chat.go()
    chat.until(stream.is_left.is_set)
    expect(chat.questions).to_have_count(1)
    chat.talk(("Again", "whole"))
