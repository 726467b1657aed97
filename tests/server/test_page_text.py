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
        expect(answer.get_by_text("Copied").first).to_be_visible()
        chat.until(lambda wanted=wanted: chat.page.evaluate("navigator.clipboard.readText()") == wanted)


def test_what_is_complete_has_its_colours_and_stays_while_the_rest_is_written(chat: Chat, script: Script) -> None:
    """What is scrolled, selected or about to be clicked in it is not taken away."""
    stream = chat.begin().say("<think>", "Hm.", "</think>", "```js\nconst a = " + "f(1) + " * 200 + "0\n")
    expect(chat.answers.get_by_text("Hm.")).to_be_hidden()
    box = chat.named("group", "Code: JavaScript", chat.answers)
    expect(chat.answers.locator("pre")).to_contain_text("const a")
    expect(chat.answers.locator("pre span")).to_have_count(0)
    stream.say("```\n", "\nOne ", "two")
    expect(chat.answers).to_contain_text("One two")
    expect(chat.answers.locator("pre .hljs-keyword")).to_have_count(1)
    box.evaluate("box => { box.scrollLeft = 50; window.box = box }")
    chat.answers.get_by_text("Reasoning").click()
    stream.say(" three", "\n\n* four", "\n* five", "\n\nsix")
    expect(chat.answers).to_contain_text("six")
    assert box.evaluate("box => box === window.box && box.scrollLeft") == 50
    expect(chat.answers.get_by_text("Hm.")).to_be_visible()
    expect(chat.answers.get_by_role("listitem")).to_have_text(["four", "five"])
    stream.end()
    chat.finished()


def test_code_of_no_known_language_stays_as_it_is(chat: Chat, script: Script) -> None:
    languages = "klingon", "constructor", "__proto__", "x" * 300
    answer = chat.told("".join(f"```{language}\nif <b> then\n```\n" for language in languages))
    assert answer.locator("pre").all_text_contents() == ["if <b> then\n"] * len(languages) and chat.widest() == 0


def test_marks_stay_in_code_with_colours(open_page: Open) -> None:
    chat = open_page(greedy=False)
    html = made(chat, 'a\n```json\n{"key": "3de5-^aa57^", "n": ^98^1, ^true^: 1}\n```\n')
    assert re.findall("<u>(.*?)</u>", re.sub("</?span[^>]*>", "", html)) == ["3de5-aa57", "981", "true"]
    assert '<span class="hljs-number"><u>981</u></span>' in html
    html = made(chat, "```js\nlet a^bc^ = `x${^n^}`\n```")
    assert re.sub("<(?!/?u>).*?>", "", html).endswith("let <u>abc</u> = `x${<u>n</u>}`\n")


# -- lists, tables, lines and links -----------------------------------------------------------------------------------


def test_lists_have_their_numbers_and_tasks_and_tables_their_columns(chat: Chat, script: Script) -> None:
    answer = chat.told("3. [ ] to do\n\n4. [X] done\n\n| a | b | c |\n|---|:-:|--:|\n| 1 | 2 | 3 |\n")
    expect(answer.get_by_role("list")).to_have_attribute("start", "3")
    assert re.findall("[☐☑]\\s+[a-z ]+", answer.get_by_role("list").inner_text()) == ["☐ to do", "☑ done"]
    for cells in ("th", "td"):
        aligned = answer.locator(cells).evaluate_all("all => all.map(one => getComputedStyle(one).textAlign)")
        assert aligned == ["left", "center", "right"]


# -- formulas ---------------------------------------------------------------------------------------------------------

# The parts of a text that are formulas, by the letters that are seen; display formulas in capital letters' place: "block".
FORMULAS: dict[str, list[str]] = {
    r"so \(x^2\) and $y_1$": ["x2", "y1"],
    r"\[ a + b \] and $$c$$": ["a+b", "c"],
    "Thus\n$$\na = b\n+ c\n$$\nand\n\\[\n- 1 \\\\\n> 2\n\\]\nend": ["a=b+c", "−1>2"],
    "1. one $a$\n   $$\n   b\n   $$\n2. **two $c$**\n\n> $$d$$\n\n| $e$ |\n|-|\n| $f$ |": list("abcdef"),
    r"$\frac{1}{2}$, $2ab$ ($x$). $\text{if } x$ and $n$-th": ["12", "2ab", "x", "if x", "n"],
    "$5 and $6, US$ 5 or 6$, $5-$6, $5 to 7$ each, from $1,000 to $2,000": [],
    "**$5** and **$6**; $HOME/bin:$PATH; $A and $B; \\$x\\$; 3$a$": [],
    "`$x$` and `` \\(y\\) ``\n\n```\n$$z$$\n\\[w\\]\n```\n\n    $v$": [],
    "$$ unclosed \\( too \\[ and $\n\n$$ here": [],
    "$$\na\n\nb\n$$": [],
}
READ = """async texts => {
  const {markdown} = await import(new URL("markdown.js", document.querySelector("script[type=module]").src));
  return texts.map(text => {
    const element = markdown([{text, mark: null}], () => null);
    return [...element.querySelectorAll("math")].map(math => math.textContent.replace(/[ \\u2061\\n]/g, (c) => c === " " ? " " : ""));
  });
}"""


def test_what_is_a_formula_and_what_is_not(open_page: Open) -> None:
    chat = open_page(greedy=False)
    found = dict(zip(FORMULAS, chat.page.evaluate(READ, list(FORMULAS))))
    plain = {text: [one.replace("\xa0", " ") for one in formulas] for text, formulas in found.items()}
    assert plain == FORMULAS


def test_formulas_are_drawn(chat: Chat, script: Script) -> None:
    answer = chat.told("A sum $\\sum_{i=1}^n i$ and\n\n$$\n\\frac{a}{b}\n$$\n\nend")
    inline, block = answer.locator("math").all()
    assert (inline.get_attribute("display"), block.get_attribute("display")) == (None, "block")
    upper, lower = (block.locator("mi").nth(i).bounding_box() for i in range(2))
    assert upper and lower and upper["y"] + upper["height"] <= lower["y"] + 2, "a fraction stands above one another"
    assert block.evaluate("math => math.namespaceURI").endswith("MathML")
    assert "\\" not in answer.locator(".markdown").inner_text()
    text = "\\(\\frac{1}\\) $\\unknowncommand{x}$\n\n$$\n\\begin{matrix} a\n$$"  # no TeX: it is shown as it was written
    answer = chat.retold(text)
    expect(answer.locator("math")).to_have_count(0)
    assert answer.locator(".markdown").inner_text().split() == text.split()


def test_a_formula_is_harmless(chat: Chat, script: Script) -> None:
    """Addresses, HTML and styles in TeX, which KaTeX knows; and a size that would push all else away."""
    answer = chat.told(
        r"$\href{javascript:window.ran=1}{a}$ $\url{http://example.com}$ $\includegraphics{http://example.com/x.png}$"
        r" $\htmlId{message}{b}$ $\htmlStyle{position:fixed}{c}$ $\htmlData{x=y}{d}$ $\class{first}{e}$ $\text{<img src=x onerror=window.ran=1>}$"
        r" $\rule{9999em}{9999em}$ $\def\a{\a\a}\a$ $\gdef\f{1}\f$ $\f$ $\color{red;position:fixed}{g}$"
    )
    found = answer.evaluate(
        "one => [...one.querySelectorAll('math, math *')].flatMap(one => one.getAttributeNames().concat(one.localName))"
    )
    assert not {"href", "src", "style", "class", "id", "onerror", "img", "a", "mglyph", "annotation"} & set(found)
    assert chat.page.evaluate("window.ran ?? null") is None
    height = answer.evaluate("one => one.getBoundingClientRect().height")
    assert height < 1500 and chat.widest() == 0
    expect(answer).to_contain_text(r"$\f$")  # a macro lives in its own formula


def test_a_formula_with_a_changed_token_is_marked(open_page: Open) -> None:
    chat = open_page(greedy=False)
    html = made(chat, "So $x + ^1^$ is\n\n$$\ny = ^2^\n$$\n\n$\\frac{^3^}$ end")
    html = re.sub(r'<u aria-label="(.*?)">', r"<u>\1: ", html)
    wanted = ["x + 1: x+1", "y = 2: y=2", "$\\frac{3}$"]
    assert re.findall("<u>([^<]*)</u>", re.sub("<(?!/?u>)[^>]*>", "", html)) == wanted
