"""The page in Chromium: pictures in messages, on a server with a small random model that sees."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Chat, Open, Script, expect, serve
from conftest import Tiny
from pictures import data_uri, png, write_projector
from serving import answered, ask
from tiny_gguf import CHAT_TEMPLATE

from pypcd.server import Server

REFUSAL = "does not see pictures"


@pytest.fixture(scope="module")
def served(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In place of the server that sees nothing."""
    projector = write_projector(tmp_path_factory.mktemp("vision") / "mmproj.gguf")
    with serve("--mmproj", str(projector), model=tiny(chat_template=CHAT_TEMPLATE), parallel=1) as server:
        yield server


def is_drawn(picture: Any) -> bool:
    return bool(picture.evaluate("async one => { await one.decode(); return one.naturalWidth > 0 }"))


def sent_for(chat: Chat, *picture: Any) -> str:
    """The address of a picture, as the page sends it."""
    asked = chat.sent("/apply-template")
    chat.attach(picture)  # type: ignore[arg-type]
    chat.told("x")
    return str(asked[-1]["messages"][-1]["content"][0]["image_url"]["url"])


# With the data of a picture it makes the event that a browser makes.
PASTE = """([text, data]) => {
  const transfer = new DataTransfer();
  const bytes = Uint8Array.from(atob(text), c => c.charCodeAt(0));
  transfer.items.add(new File([bytes], "image.png", {type: "image/png"}));
  if (data) transfer.setData("text/plain", data);
  const message = document.getElementById("message");
  const event = new ClipboardEvent("paste", {clipboardData: transfer, bubbles: true, cancelable: true});
  return message.dispatchEvent(event);
}"""


def test_a_picture_is_chosen_pasted_dropped_shown_and_sent(chat: Chat, script: Script, tmp_path: Path) -> None:
    asked = chat.sent("/apply-template")
    pictures = [png(n) for n in range(3)]
    (tmp_path / "chosen.png").write_bytes(pictures[0])
    chat.choose("Attach files", tmp_path / "chosen.png")
    expect(chat.button("Remove chosen.png")).to_be_visible()
    chat.page.evaluate(PASTE, [base64.b64encode(pictures[1]).decode(), ""])
    expect(chat.button("Remove image.png")).to_be_visible()
    chat.attach(("dropped.png", "image/png", pictures[2]))
    shown = chat.page.locator("form img")
    expect(shown).to_have_count(3)
    assert all(map(is_drawn, shown.all()))
    chat.button("Remove image.png").click()
    answer = chat.told("A cat.", text="What is this?")
    expect(answer).to_contain_text("A cat.")
    parts = asked[-1]["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert parts[2]["text"] == "What is this?"
    urls = [part["image_url"]["url"] for part in parts[:2]]
    assert all(url.startswith("data:image/png;base64,") for url in urls) and urls[0] != urls[1]
    prompt = script.streams[-1].body["prompt"]
    assert prompt["multimodal_data"] == [url.partition(",")[2] for url in urls]

    for name in ("chosen.png", "dropped.png"):
        assert is_drawn(chat.questions.get_by_role("img", name=name))
    assert chat.widest() == 0 and chat.axe() == []
    # a later question has them before it, after a reload too
    chat.go()
    assert is_drawn(chat.questions.get_by_role("img", name="chosen.png"))
    chat.told("Yes.", text="Sure?")
    assert script.streams[-1].body["prompt"]["multimodal_data"] == prompt["multimodal_data"]
    chat.attach(("chosen.png", "image/png", pictures[0]), ("notes.txt", "text/plain", b"some notes"))
    chat.told("Both.", text="And these?")
    read, *others = script.streams[-1].body["messages"][-1]["content"]
    assert read["file"]["text"].strip() == "some notes"
    assert others == [parts[0], {"type": "text", "text": "And these?"}]


def test_a_large_picture_is_made_smaller_and_a_photograph_a_jpeg(chat: Chat, script: Script) -> None:
    large = chat.page.evaluate(
        """() => { const canvas = Object.assign(document.createElement("canvas"), {width: 5000, height: 100});
          canvas.getContext("2d").fillRect(0, 0, 99, 99);
          return canvas.toDataURL("image/webp").split(",")[1] }"""
    )
    url = sent_for(chat, "large.webp", "image/webp", base64.b64decode(large))
    assert url.startswith("data:image/png;base64,")  # servers do not read WebP
    assert int.from_bytes(base64.b64decode(url.partition(",")[2])[16:20], "big") == 2048
    url = sent_for(chat, "noise.png", "image/png", png(0, 1200))
    assert url.startswith("data:image/jpeg;base64,") and len(url) < 4_000_000 < len(data_uri(png(0, 1200)))


def test_a_model_that_does_not_see_says_so(chat: Chat, script: Script) -> None:
    chat.attach(("cat.png", "image/png", png(0)))
    chat.told("A cat.", text="What is this?")
    # as if another model were behind the address, which does not see
    told = {**ask(chat.server, "/props")[1], "modalities": {"vision": False, "audio": False}}
    chat.page.context.route("**/props?*", lambda route: route.fulfill(json=told))
    chat.go()
    asked = chat.sent("/apply-template")
    expect(chat.questions).to_contain_text(REFUSAL)  # a picture of a talk with a model that saw is left out
    chat.told("No.", text="Sure?")
    assert [message["content"] for message in asked[-1]["messages"]] == ["What is this?", "A cat.", "Sure?"]
    assert isinstance(script.streams[-1].body["prompt"], str)
    chat.button("Edit", chat.questions.first).click()
    chat.button("Send again").click()
    expect(chat.alert).to_contain_text(REFUSAL)
    chat.new()
    chat.drop(("dog.png", "image/png", png(0)))
    expect(chat.alert).to_contain_text("dog.png is a picture")
    expect(chat.page.get_by_role("img")).to_have_count(0)
    # pasted with a text, as tables are: the text is what was meant
    assert chat.page.evaluate(PASTE, [base64.b64encode(png(0)).decode(), "1\t2"]), "left to the browser"


def test_what_is_no_picture_is_refused_with_a_sentence(chat: Chat, script: Script) -> None:
    chat.drop(("broken.png", "image/png", png(0)[:40]))
    expect(chat.alert).to_contain_text("broken.png is no picture")
    chat.attach(("drawing.svg", "image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>"))
    expect(chat.page.get_by_role("img")).to_have_count(0)  # it is a text


def test_answers_about_pictures_are_those_of_the_server(open_page: Open, served: Server) -> None:
    """The page asks /apply-template and /completion; the server's own answer is that of /v1/chat/completions."""
    said = []
    for n in range(2):
        chat = open_page()
        chat.set(longest_answer=8)
        chat.attach(("random.png", "image/png", png(n)))
        said.append(chat.copied(chat.ask("bada")))
        content = [{"type": "image_url", "image_url": {"url": data_uri(png(n))}}, {"type": "text", "text": "bada"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
        answer = answered(served, "/v1/chat/completions", body)
        assert said[-1] == answer["choices"][0]["message"]["content"]
    assert said[0] != said[1], "what is in the picture must matter, or this shows nothing"
    chat.set(longest_answer=4)
    before = chat.copied(chat.answers)
    chat.button("Continue", chat.answers).click()
    chat.until(lambda: chat.copied(chat.finished()) != before)
    assert chat.copied(chat.answers).startswith(before)
