"""The page in Chromium: code with its colours, formulas."""

from __future__ import annotations

import re
from typing import Any

import pytest
from browser import Chat, Open, Script, candidates, event, expect

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


def test_a_button_says_that_it_has_copied(chat: Chat, script: Script) -> None:
    answer = chat.told("```\nx\n```\n")
    press = chat.button("Copy code", answer)
    press.evaluate(
        """press => { window.said = [];
          new MutationObserver(() => said.push(press.textContent)).observe(press, {childList: true}) }"""
    )
    press.click()
    chat.until(lambda: chat.page.evaluate("said") == ["Copied", "Copy code"])


def test_code_has_colours_when_it_is_complete(chat: Chat, script: Script) -> None:
    stream = chat.begin().say("```js\nconst a = 1;\n", "const b = 2;\n")
    expect(chat.answers.locator("pre")).to_contain_text("const b")
    expect(chat.answers.locator("pre span")).to_have_count(0)
    stream.say("```\n", "And ", "more")
    expect(chat.answers).to_contain_text("And more")
    expect(chat.answers.locator("pre .hljs-keyword")).to_have_count(2)
    stream.end()
    chat.finished()


def test_what_is_complete_stays_while_the_rest_is_written(chat: Chat, script: Script) -> None:
    """What is scrolled, selected or about to be clicked in it is not taken away."""
    stream = chat.begin().say("<think>", "Hm.", "</think>", "```js\n" + "f(1) + " * 200 + "0\n```\n", "\nOne ", "two")
    box = chat.named("group", "Code: JavaScript", chat.answers)
    expect(chat.answers).to_contain_text("One two")
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


def test_code_is_as_large_in_a_block_as_in_a_line(chat: Chat, script: Script) -> None:
    code = chat.told("`a`\n\n```\nb\n```\n").locator("code")
    sizes = code.evaluate_all("all => all.map(one => getComputedStyle(one).fontSize)")
    assert len(sizes) == 2 and sizes[0] == sizes[1]


# -- lists, tables, lines and links -----------------------------------------------------------------------------------


def test_a_list_of_tasks_shows_what_is_done(open_page: Open) -> None:
    chat = open_page(greedy=False)
    in_paragraphs = "1. [ ] to ^do^\n\n2. [X] done\n"
    for text in ("- [ ] to ^do^\n- [x] done", in_paragraphs):
        html = made(chat, text)
        assert re.findall("[☐☑] [a-z ]+", re.sub("<.*?>", "", html)) == ["☐ to do", "☑ done"], html
        assert "<u>do</u>" in html


def test_columns_of_a_table_are_aligned_and_its_box_is_as_wide(chat: Chat, script: Script) -> None:
    answer = chat.told("| a | b | c |\n|---|:-:|--:|\n| 1 | 2 | 3 |\n")
    for cells in ("th", "td"):
        aligned = answer.locator(cells).evaluate_all("all => all.map(one => getComputedStyle(one).textAlign)")
        assert aligned == ["left", "center", "right"]
    box = chat.named("group", "Table", answer)
    assert box.evaluate("box => box.clientWidth - box.firstChild.offsetWidth") < 40


def test_lines_and_refused_links_have_colours_of_the_page(open_page: Open, script: Script) -> None:
    chat = open_page(color_scheme="dark")
    chat.play(script)
    answer = chat.told("[not](javascript:1)\n\n---\n\n$\\url{x}$\n")
    text, link, formula, line = answer.evaluate(
        """one => ['.markdown', 'a', 'math *:not(:has(*))', 'hr'].map((name, i) =>
          getComputedStyle(one.querySelector(name))[i < 3 ? 'color' : 'borderTopColor'])"""
    )
    assert link == text and formula == text
    assert answer.locator("hr").evaluate("line => getComputedStyle(line).borderBottomWidth") == "0px"
    assert max(int(number) for number in re.findall(r"\d+", line)[:3]) < 80


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


def test_a_list_begins_with_its_number(chat: Chat, script: Script) -> None:
    expect(chat.told("3. three\n4. four\n").get_by_role("list")).to_have_attribute("start", "3")


def test_formulas_are_drawn(chat: Chat, script: Script) -> None:
    answer = chat.told("A sum $\\sum_{i=1}^n i$ and\n\n$$\n\\frac{a}{b}\n$$\n\nend")
    inline, block = answer.locator("math").all()
    assert (inline.get_attribute("display"), block.get_attribute("display")) == (None, "block")
    upper, lower = (block.locator("mi").nth(i).bounding_box() for i in range(2))
    assert upper and lower and upper["y"] + upper["height"] <= lower["y"] + 2, "a fraction stands above one another"
    assert block.evaluate("math => math.namespaceURI").endswith("MathML")
    assert "\\" not in answer.locator(".markdown").inner_text()


def test_what_is_no_tex_is_shown_as_it_was_written(chat: Chat, script: Script) -> None:
    for text in (r"\(\frac{1}\)", r"$\unknowncommand{x}$", "$$\n\\begin{matrix} a\n$$"):
        answer = (chat.retold if chat.answers.count() else chat.told)(text)
        expect(answer.locator("math")).to_have_count(0)
        assert answer.locator(".markdown").inner_text().split() == text.split()
        assert chat.copied(answer) == text


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


# -- all of it --------------------------------------------------------------------------------------------------------

ALL = r"""The mean is \(\bar{x} = \frac{1}{n} \sum_{i=1}^{n} x_i\) at 14:^30^, for €^5^.

1. ^981^ in a list, $\alpha_^1^^2$
2. a formula:

   $$
   f(x) = \begin{cases} x^{2} & \text{if } x > 0 \\ 0 & \text{otherwise} \end{cases} \qquad A = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
   $$

| Key | Formula |
|---|---|
| 3de5-^aa57^ | $e^{i\pi} = ^-1^$ |

```python
@cache
def answer(n: int = ^981^, key: str = "3de5-^aa57^") -> str:  # a comment of ^1^ line, which is wider than a telephone
    return f"{n:>5}" if ^n^ else None
```

\[ L = (1+\beta)\,\log p(x \mid c) - \beta \log p'(x \mid c) + \int_0^\infty e^{-t}\,dt + ^981^ \]
"""


def changed(text: str) -> dict[str, Any]:
    """A token that PCD changed."""
    entry = event(text, 1, top_logprobs=candidates(1, 2))
    (told,) = entry["completion_probabilities"]
    told["pcd"] = {"standard": -3.0, "local": -1.0, "contrasted": -0.1, "strength": 1.0, "pushed_out": []}
    told["top_logprobs"] = [
        {"id": n, "token": text * n, "bytes": [*(text * n).encode()], "logprob": row["contrasted"], "pcd": row}
        for n, row in ((1, told["pcd"]), (2, {"standard": -0.1, "local": -0.1, "contrasted": -3.0}))
    ]
    return entry


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360), ("dark", 360)])
def test_code_formulas_and_marks_are_accessible_and_fit(
    open_page: Open, script: Script, scheme: str, width: int
) -> None:
    chat = open_page(viewport={"width": width, "height": 740}, color_scheme=scheme)
    chat.play(script)
    # "^…^" is a changed token, unless TeX has it: there "^" stands before a brace, a backslash or alone
    parts = re.split(r"\^([\w-]+)\^(?![{\\])", ALL)
    answer = chat.told(*(changed(part) if i % 2 else part for i, part in enumerate(parts) if part))
    marks = [one.inner_text() for one in answer.locator("button.changed").all()]
    assert marks[:3] == ["14:30", "€5", "981"] and "3de5-aa57" in marks and len(marks) == len(parts) // 2
    assert chat.axe() == []
    assert chat.widest() == 0
    text = answer.locator(".markdown")
    assert text.evaluate("text => text.scrollWidth - text.clientWidth") == 0, "wide things scroll in their own boxes"
