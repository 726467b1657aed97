"""The page in Chromium: code with its colours, formulas."""

from __future__ import annotations

import re
from typing import Any

from browser import Chat, Open, Script, expect

pytest_plugins = ["browser"]  # fixtures

PYTHON = """@cache
def answer(n: int = 42) -> str:
    return f"the number is {n:,}"  # of the key 3de5-aa57
"""

# An answer of markdown.js, whose marked words are in <u>.
MADE = """
async pieces => {
  const {markdown} = await import(new URL("markdown.js", document.querySelector("script[type=module]").src));
  const element = markdown(pieces.map(([text, is], i) => ({text, mark: is ? i : null})), () => document.createElement("u"));
  return element.innerHTML;
}
"""


def made(chat: Chat, text: str) -> str:
    """The HTML of a text whose changed tokens are in ^…^."""
    parts = text.split("^")
    return chat.page.evaluate(MADE, [[part, i % 2 == 1] for i, part in enumerate(parts)])


def colours(chat: Chat, within: Any) -> set[str]:
    return set(within.evaluate("one => [...one.querySelectorAll('span')].map(one => getComputedStyle(one).color)"))


# -- code -------------------------------------------------------------------------------------------------------------


def test_code_has_colours_its_language_and_a_button_that_copies_it(chat: Chat, script: Script) -> None:
    shell = "$ pip install 'x<2' && echo done"
    answer = chat.told(f"So:\n\n```python\n{PYTHON}```\n\n```sh\n{shell}\n```\n\n```\nplain *text*\n```\n")
    code = answer.locator("pre")
    assert code.all_text_contents() == [PYTHON, shell + "\n", "plain *text*\n"]
    assert len(colours(chat, code.first)) >= 4
    expect(code.first.locator(".hljs-keyword").first).to_have_text("def")
    expect(code.last.locator("span")).to_have_count(0)
    for name in ("Python", "Bash"):
        expect(answer.get_by_text(name, exact=True)).to_be_visible()
        expect(chat.named("group", f"Code: {name}", answer)).to_be_visible()
    for i, wanted in enumerate((PYTHON.rstrip("\n"), shell, "plain *text*")):
        chat.button("Copy code", answer).nth(i).click()
        chat.until(lambda wanted=wanted: chat.page.evaluate("navigator.clipboard.readText()") == wanted)


def test_code_has_colours_when_it_is_complete(chat: Chat, script: Script) -> None:
    stream = chat.begin().say("```js\nconst a = 1;\n", "const b = 2;\n")
    expect(chat.answers.locator("pre")).to_contain_text("const b")
    expect(chat.answers.locator("pre span")).to_have_count(0)
    stream.say("```\n", "And ", "more")
    expect(chat.answers).to_contain_text("And more")
    expect(chat.answers.locator("pre .hljs-keyword")).to_have_count(2)
    stream.end()
    chat.finished()


def test_code_of_no_known_language_stays_as_it_is(chat: Chat, script: Script) -> None:
    for language in ("klingon", "constructor", "__proto__", "x" * 300, 'html" onclick="window.ran=1'):
        answer = (chat.retold if chat.answers.count() else chat.told)(f"```{language}\nif <b> then\n```\n")
        expect(answer.locator("pre")).to_have_text("if <b> then\n")
        assert chat.widest() == 0
    assert chat.page.evaluate("window.ran ?? null") is None


def test_marks_stay_in_code_with_colours(open_page: Open) -> None:
    chat = open_page(greedy=False)
    html = made(chat, 'a\n```json\n{"key": "3de5-^aa57^", "n": ^98^1, ^true^: 1}\n```\n')
    assert re.findall("<u>(.*?)</u>", re.sub("</?span[^>]*>", "", html)) == ["3de5-aa57", "981", "true"]
    assert '<span class="hljs-number"><u>981</u></span>' in html
    html = made(chat, "```js\nlet a^bc^ = `x${^n^}`\n```")
    assert re.sub("<(?!/?u>).*?>", "", html).endswith("let <u>abc</u> = `x${<u>n</u>}`\n")


def test_a_wide_block_of_code_scrolls_by_itself(open_page: Open, script: Script) -> None:
    chat = open_page(viewport={"width": 360, "height": 740})
    chat.play(script)
    answer = chat.told("```python\n" + "x = " + "f(1, 2) + " * 40 + "0\n```\n")
    box = chat.named("group", "Code: Python", answer)
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    assert chat.widest() == 0
    chat.button("Copy code", answer).click(trial=True)
    expect(chat.button("Copy code", answer)).to_be_in_viewport()
