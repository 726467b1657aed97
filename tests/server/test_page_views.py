"""The page in Chromium: each view in light and dark, wide and narrow, by keyboard, and as a screen reader meets it.

PYPCD_PAGE_PICTURES names a folder for pictures of the views, for people to look at:

    PYPCD_PAGE_PICTURES=build/page scripts/test tests/server/test_page_views.py
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Chat, Open, Script, candidates, event, expect, question
from playwright.sync_api import Locator

PICTURES = os.environ.get("PYPCD_PAGE_PICTURES")

MARKDOWN = r"""# A heading

Some *words* with `code`, a [link](https://example.com/), and a word-that-is-so-long-that-no-line-has-room-for-the-whole-of-it-anywhere.

> Quoted: the mean is \(\bar{x} = \frac{1}{n} \sum_{i=1}^{n} x_i\) at 14:30, for €5.

1. 981 in a list, $\alpha_1^2$
   - nested
2. a formula:

   $$
   f(x) = \begin{cases} x^{2} & \text{if } x > 0 \\ 0 & \text{otherwise} \end{cases} \qquad A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
   $$

| Key | Formula | A third column with a long title | And a fourth one |
|---|---|---|---|
| 3de5-aa57 | $e^{i\pi} = -1$ | quite a few words that do not fit | 1234567890 |

```python
@cache
def answer(n: int = 981, key: str = "3de5-aa57") -> str:  # a comment of 1 line, which is wider than a telephone
    return f"{n:>5}" if n else None
```

\[ L = (1+\beta)\,\log p(x \mid c) - \beta \log p'(x \mid c) + \int_0^\infty e^{-t}\,dt + 981 \]
"""


def changed(text: str) -> dict[str, Any]:
    """A token that PCD changed."""
    rows = {"standard": -3.0, "local": -1.0, "contrasted": -0.1}, {"standard": -0.1, "local": -0.1, "contrasted": -3.0}
    options = [{**one, "pcd": row} for one, row in zip(candidates(1, 2), rows)]
    return event(text, 1, top_logprobs=options, pcd={**rows[0], "strength": 1.0, "pushed_out": []})


def views(chat: Chat, script: Script) -> Iterator[str]:
    """The page shows one view after another; their names."""
    page = chat.page
    yield "empty"
    chat.ask(question(30)[0])
    yield "chat"
    chat.tokens(chat.answers)
    yield "tokens"
    dialog = chat.open_token(chat.tokens(chat.answers).nth(1))
    yield "token"
    chat.button("Close", dialog).click()
    chat.button("Tokens", chat.answers).click()
    group = chat.compare(question(30, 1)[0])
    expect(group.get_by_role("button", name="Go on with this")).to_have_count(2)
    expect(chat.button("Send")).to_be_visible()
    chat.tokens(group.get_by_role("article", name=re.compile("^With PCD")))
    yield "compare"
    chat.button("Go on with this", group).last.click()
    chat.play(script)
    answer = chat.told(MARKDOWN, changed("The end."), text="Show what you can.")
    text = answer.locator(".markdown")
    assert text.evaluate("text => text.scrollWidth - text.clientWidth") == 0, "wide things scroll in their own boxes"
    yield "markdown"
    chat.edit(chat.questions.last)
    yield "editing"
    chat.button("Cancel").click()
    dialog = chat.pcd_dialog()
    dialog.get_by_role("radio", name=re.compile("^custom")).check()
    yield "pcd"
    chat.done(dialog)
    dialog = chat.settings()
    yield "settings"
    chat.done(dialog)
    chat.menu()
    yield "conversations"
    page.keyboard.press("Escape")
    stream = chat.begin("Read this.")
    report = {"total": 200_000, "cache": 0, "processed": 51_200, "time_ms": 60_000}
    stream.say({"content": "", "tokens": [], "stop": False, "prompt_progress": report})
    expect(chat.named("progressbar", "Reading")).to_be_visible()
    yield "reading"
    stream.say({"error": {"code": 500, "message": "The context is full.", "type": "server_error"}}).just_end()
    expect(chat.alert).to_be_visible()
    yield "error"


SIZES = [("light", 1280), ("dark", 360), *([("light", 360), ("dark", 1280)] if PICTURES else [])]


@pytest.mark.parametrize(("colours", "width"), SIZES)
def test_every_view_is_accessible_and_fits(open_page: Open, script: Script, colours: str, width: int) -> None:
    chat = open_page(width=width, color_scheme=colours)
    seen = []
    for name in views(chat, script):
        seen.append(name)
        if PICTURES:
            chat.page.evaluate(
                "for (const box of document.querySelectorAll('html, article *')) box.scrollTop = box.scrollHeight"
            )
            chat.page.screenshot(path=Path(PICTURES) / f"{name}-{width}-{colours}.png")
        assert chat.axe() == [], name
        assert chat.widest() == 0, f"{name} scrolls sideways"
    assert len(seen) == 12


def background(chat: Chat) -> int:
    """How bright the page is, 0 to 255."""
    colour = chat.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(int(number) for number in re.findall(r"\d+", colour)[:3])


def test_colours_follow_the_system_or_the_choice(open_page: Open) -> None:
    chat = open_page(greedy=False, color_scheme="dark")
    assert background(chat) < 80
    chat.set(colours="light")
    chat.go()
    assert background(chat) > 200
    chat.set(colours="as the system")
    assert background(chat) < 80


# -- by keyboard and with a screen reader -----------------------------------------------------------------------------

FOCUSED = """() => {
  const one = document.activeElement;
  const name = one.ariaLabel ?? one.labels?.[0]?.textContent ?? one.textContent;
  return name.trim().replace(/\\s+/g, ' ');
}"""


def tabbed(chat: Chat, name: str, key: str = "Tab", most: int = 60) -> None:
    """Press Tab until the focus is on something of that name."""
    for _ in range(most):
        chat.page.keyboard.press(key)
        if chat.page.evaluate(FOCUSED).startswith(name):
            return
    raise AssertionError(f"{name} is not reached")


def test_a_whole_talk_by_keyboard_alone(chat: Chat, script: Script) -> None:
    keys = chat.page.keyboard
    tabbed(chat, "Settings")
    keys.press("Enter")
    dialog = chat.named("dialog", "Settings")
    expect(dialog).to_be_visible()
    assert dialog.evaluate("dialog => dialog.contains(document.activeElement)")
    tabbed(chat, "Temperature")
    keys.press("ControlOrMeta+a")
    keys.type("0.25")
    keys.press("Escape")
    expect(dialog).to_be_hidden()
    assert chat.page.evaluate(FOCUSED) == "Settings"
    tabbed(chat, "PCD:")
    keys.press("Enter")
    dialog = chat.named("dialog", "PCD")
    expect(dialog).to_be_visible()
    tabbed(chat, "the server's")
    keys.press("ArrowUp")
    expect(dialog.get_by_role("radio", name=re.compile("^custom"))).to_be_checked()
    keys.press("ArrowDown")
    keys.press("Escape")
    tabbed(chat, "Message")
    keys.type("Hello")
    keys.press("Enter")
    stream = script.next(chat)
    assert stream.body["temperature"] == 0.25
    stream.say(*(event(" w1", 1, top_logprobs=candidates(1, 2)) for _ in range(3)))
    expect(chat.answers).to_contain_text("w1 w1 w1")
    tabbed(chat, "Stop", most=5)
    keys.press("Enter")
    answer = chat.finished()
    tabbed(chat, "Tokens", "Shift+Tab")
    keys.press("Space")
    expect(chat.button("Tokens", answer)).to_have_attribute("aria-pressed", "true")
    for _ in range(20):
        keys.press("Shift+Tab")
        if chat.page.evaluate("document.activeElement.closest('[role=group]') !== null"):
            break
    tokens = chat.tokens(answer)
    for key, i in (("End", 2), ("Home", 0), ("ArrowRight", 1)):
        keys.press(key)
        expect(tokens.nth(i)).to_be_focused()
    keys.press("Tab")  # one stop for Tab: the next is behind the tokens
    assert not chat.page.evaluate("document.activeElement.closest('[role=group]') !== null")
    keys.press("Shift+Tab")
    dialog = chat.named("dialog", "Token")
    keys.press("Enter")
    expect(dialog).to_be_visible()
    keys.press("Escape")
    expect(tokens.nth(1)).to_be_focused()
    keys.press("Enter")
    expect(dialog).to_be_visible()
    tabbed(chat, "Go on with")
    keys.press("Enter")
    expect(dialog).to_be_hidden()
    script.next(chat).say(" end").end()
    assert chat.copied(chat.finished()) == " w1 w2 end"
    expect(chat.answers).to_contain_text(re.compile(r"2 of 2"))


def test_the_focus_is_never_lost_and_after_an_answer_in_the_message_box(chat: Chat, script: Script) -> None:
    """If what had the focus goes away, the focus is not nowhere: a keyboard's user would begin at the top again."""

    def pressed(name: str, within: Locator | None = None) -> None:
        chat.button(name, within).focus()
        chat.page.keyboard.press("Enter")
        chat.until(lambda: chat.page.evaluate("document.activeElement !== document.body"))

    expect(chat.message).to_be_focused()
    chat.page.keyboard.type("Say")
    pressed("Send")
    stream = script.next(chat).say("x")
    chat.answers.click()  # reading does not count as doing something
    stream.end()
    chat.finished()
    expect(chat.message).to_be_focused()
    for name in ("Edit", "Cancel", "Edit", "Send again"):
        pressed(name)
    script.next(chat).say("y").end()
    chat.finished()
    pressed("Retry", chat.answers)
    stream = script.next(chat).say("z")
    chat.button("Edit").focus()  # who does another thing meanwhile is left there
    stream.end()
    chat.finished()
    expect(chat.button("Edit")).to_be_focused()
    pressed("Previous version", chat.answers)


def test_a_screen_reader_hears_the_beginning_and_the_end_and_not_each_token(chat: Chat, script: Script) -> None:
    chat.page.evaluate(
        """() => { window.heard = [];
          const live = '[role=status], [role=alert], [role=log], [aria-live]:not([aria-live=off])';
          new MutationObserver(changes => { for (const {target} of changes) {
            const region = (target.nodeType === 1 ? target : target.parentElement)?.closest(live);
            if (region && !region.closest('[aria-busy=true]')) heard.push(region.textContent.trim());
          } }).observe(document.body, {subtree: true, childList: true, characterData: true}) }"""
    )
    stream = chat.begin("Say")
    for word in [f" word{n}" for n in range(30)]:
        stream.say(word)
    expect(chat.answers).to_contain_text("word29")
    expect(chat.answers).to_have_attribute("aria-busy", "true")
    heard = chat.page.evaluate("heard")
    assert len(set(heard)) <= 3 and not any("word3" in one for one in heard), heard
    stream.end()
    chat.finished()
    chat.until(lambda: any("word29" in one for one in chat.page.evaluate("heard")))
