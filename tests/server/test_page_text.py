"""The page in Chromium: what a model, a user or a server may write, none of which is trusted: code, formulas, harm.

A page that ran something, loaded something or ran into its content security policy fails in browser.Watch. So the first tests are
that the watch sees such things. (What is in files: test_page_files.)
"""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from browser import Chat, Open, Script, event, expect
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# -- the watch, and the browser's own guard ---------------------------------------------------------------------------

GUARD = "<meta http-equiv='Content-Security-Policy' content=\"script-src 'none'; img-src 'none'\">"
FAULTS = {
    "request: http://example.com/x": "<img src=http://example.com/x>",
    "request: ws://127.0.0.1:1/": "<script>new WebSocket('ws://127.0.0.1:1/')</script>",
    "exception: .*no such": "<script>throw new Error('no such')</script>",
    "console: error: oh": "<script>console.error('oh')</script>",
    "console: warning: ah": "<script>console.warn('ah')</script>",
    "policy: script-src-elem inline": GUARD + "<script>1</script>",
    "policy: script-src-attr inline": GUARD + "<body onload=1>",
}


def test_the_watch_sees(open_page: Open) -> None:
    chat = open_page(greedy=False)
    bodies = list(FAULTS.values())
    chat.page.context.route("**/bad", lambda route: route.fulfill(body=bodies.pop(0), content_type="text/html"))
    for pattern in FAULTS:
        chat.page.goto(chat.server.url + "/bad")
        chat.until(lambda pattern=pattern: any(re.search(pattern, fault) for fault in chat.watch.faults))
        with pytest.raises(AssertionError):
            chat.watch.check()
        chat.watch.faults.clear()


TRIES = [
    ("fetch('http://127.0.0.1:9/').catch(() => {})", "connect-src"),
    ("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))", "img-src"),
    ("new WebSocket('ws://127.0.0.1:9/')", "connect-src"),
    ("document.body.append(Object.assign(document.createElement('iframe'), {src: 'data:text/html,x'}))", "frame-src"),
    ("document.body.innerHTML = '<b>x</b>'", "trusted-types"),
    ("trustedTypes.createPolicy('anything', {})", "trusted-types"),
]


def test_the_policy_refuses(open_page: Open) -> None:
    chat = open_page(greedy=False)
    policy = chat.page.locator("meta[http-equiv='Content-Security-Policy']").get_attribute("content") or ""
    assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for 'script'" in policy
    # each is told more than once
    chat.watch.allow("^policy: ", "^console: error: ", "^request: http://127.0.0.1:9/x.png")
    for tried, pattern in TRIES:
        n = len(chat.watch.faults)
        chat.page.evaluate(f"try {{ {tried} }} catch {{}}")  # some are refused by an exception as well
        seen = re.compile(f"policy: .*{pattern}")
        chat.until(lambda n=n, seen=seen: any(map(seen.search, chat.watch.faults[n:])))


# -- what is written --------------------------------------------------------------------------------------------------

RUN = "window.ran=1"
HOSTILE = {
    "script": f"<script>{RUN}</script>",
    "img": f"<img src=x onerror='{RUN}'><img src=http://example.com/a.png>",
    "svg": f"<svg onload={RUN}><script>{RUN}</script><a xlink:href='javascript:{RUN}'><text>x</text></a></svg>",
    "math": f"<math><mtext></p><style><img src=x onerror={RUN}></style></mtext></math>",
    "iframe": f"<iframe srcdoc='<script>parent.ran=1</script>'></iframe><iframe src='javascript:parent.{RUN}'></iframe>",
    "object": "<object data=http://example.com/x></object><embed src=http://example.com/x>",
    "style": "<style>@import url(http://example.com/x.css); * {display: none}</style><p style='position:fixed;inset:0'>x</p>",
    "form": f"<form action=http://example.com><input autofocus onfocus={RUN}><button>Send</button></form>",
    "base": "<base href=http://example.com/><meta http-equiv=refresh content='0;url=http://example.com/'>",
    "link": "<link rel=stylesheet href=http://example.com/x.css><link rel=prefetch href=http://example.com/y>",
    "details": f"<details open ontoggle={RUN}>x</details><video onerror={RUN}><source src=x></video>",
    "template": f"<template><script>{RUN}</script></template><noscript><p title='</noscript><img src=x onerror={RUN}>'>",
    "names": "<img name=getElementById><form id=location></form><a id=document name=cookie>x</a><input name=attributes>",
    "links": f"[a](javascript:{RUN}) [b](JaVaScRiPt:{RUN}) [c](java\tscript:{RUN}) [d](&#106;avascript:{RUN}) <javascript:{RUN}>",
    "data links": "[a](data:text/html,<script>1</script>) [b](vbscript:x) [c](file:///etc/passwd) [d](blob:x) [e](//example.com)",
    "good links": '[a](https://example.com/ "title") <https://example.org> https://example.net me@example.com',
    "images": "![a](http://example.com/a.png) ![b](javascript:1) ![c][r]\n\n[r]: data:image/png;base64,AAAA",
    "quotes": f'[a](<https://example.com/" onmouseover="{RUN}>) ![x" onerror="{RUN}](y) `"><img src=x onerror={RUN}>`',
    "code": f'```html" onclick="{RUN}\n<script>{RUN}</script>\n```\n\n    <img src=x onerror={RUN}>',
    "entities": f"&lt;script&gt;{RUN}&lt;/script&gt; &#60;img src=x onerror={RUN}&#62; &amp;lt;b&amp;gt;",
    "broken": f"<<script>{RUN}//<</script <img src=x onerror={RUN}// <a href='x <!-- -- ]]> <?php <![CDATA[ ${{{RUN}}} {{{{x}}}}",
    "lit": "<!--lit-part--> <!--?lit$123456$--> <!--lit-node 0--> lit$1$",
    "marks": "\ue000" + "1\ue001word\ue002 \ue000\ue0019 \ue002\ue001\ue000 a\ue0000\ue001<b>\ue002",
    "direction": "\u202eevil\u202c \u0000 \ufeff \u2066x \ud7ff \ufffd",
    "task lists": "- [ ] one\n- [x] <img src=x onerror=window.ran=1>\n\n| a |\n|:-:|\n| <script>window.ran=1</script> |",
}

# All that an answer may be made of.
MADE_OF = {
    "a", "b", "blockquote", "br", "button", "code", "del", "details", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr",
    "li", "ol", "p", "pre", "span", "strong", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul",
    "math", "menclose", "mfrac", "mi", "mn", "mo", "mover", "mpadded", "mphantom", "mroot", "mrow", "mspace", "msqrt", "mstyle", "msub",
    "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover", "semantics",
}  # fmt: skip

LOOK = """article => {
  const all = [...article.querySelectorAll('*')];
  return {
    tags: [...new Set(all.map(one => one.localName))],
    handlers: all.flatMap(one => one.getAttributeNames().filter(name => name.startsWith('on'))),
    styles: all.filter(one => one.hasAttribute('style') && /url|fixed|expression/i.test(one.getAttribute('style'))).length,
    links: all.filter(one => one.localName === 'a').map(one => [one.href, one.target, one.rel]),
    ids: all.map(one => one.id).filter(Boolean),
    ran: window.ran ?? null,
  };
}"""


def is_harmless(found: dict[str, Any]) -> dict[str, Any]:
    assert found["ran"] is None, "something ran"
    assert not found["handlers"] and not found["styles"], found
    assert set(found["tags"]) <= MADE_OF, set(found["tags"]) - MADE_OF
    assert not {"getElementById", "location", "document"} & set(found["ids"])
    for href, target, rel in found["links"]:
        assert re.match("https?://|mailto:|$", href), href
        assert target == "_blank" and "noopener" in rel and "noreferrer" in rel
    return found


def test_what_a_model_writes_is_never_run_or_loaded(chat: Chat, script: Script) -> None:
    for name, text in HOSTILE.items():
        answer = chat.shown(text[: len(text) // 2], text[len(text) // 2 :])
        found = is_harmless(answer.evaluate(LOOK))
        assert chat.copied(answer) == text, name
        if name == "good links":
            assert {"https://example.com/", "https://example.org/"} <= {href for href, _, _ in found["links"]}
    options = [
        {"id": n, "token": text, "bytes": [*text.encode()], "logprob": -1.0 - n}
        for n, text in enumerate(HOSTILE.values())
    ]
    answer = chat.retold(event(HOSTILE["img"], 0, top_logprobs=options), *HOSTILE.values())
    tokens = chat.tokens(answer)
    is_harmless(answer.evaluate(LOOK))
    expect(chat.button("Settings")).to_be_visible()  # nothing lies over the page
    dialog = chat.open_token(tokens.first)
    expect(dialog).to_contain_text("onerror")
    assert not {"img", "script"} & set(dialog.evaluate(LOOK)["tags"])


def test_what_a_user_writes_is_harmless_too(chat: Chat, script: Script) -> None:
    text = "\n".join(HOSTILE[name] for name in ("script", "img", "svg", "links", "form", "lit"))
    chat.told("x", text=text)
    is_harmless(chat.questions.evaluate(LOOK))
    assert chat.copied(chat.questions) == text
    listed = chat.menu()  # its beginning is the title
    assert chat.page.evaluate("window.ran ?? null") is None
    expect(listed).to_contain_text("<script>")
    assert not listed.locator("img, script, svg[onload]").count()


def test_what_a_server_says_is_harmless(chat: Chat, script: Script) -> None:
    chat.begin("Say").fail(400, json.dumps({"error": {"message": HOSTILE["img"] + HOSTILE["script"]}}).encode())
    chat.watch.allow("the server responded with a status of 400")
    expect(chat.alert).to_contain_text("onerror")
    assert not chat.alert.locator("img, script").count()
    models = {"data": [{"id": HOSTILE["img"]}, {"id": "__proto__"}, {"id": "x" * 3000}]}
    chat.page.context.route(
        "**/v1/models", lambda route: route.fulfill(body=json.dumps(models), content_type="application/json")
    )
    chat.go()
    expect(chat.named("combobox", "Model").locator("option")).to_contain_text([HOSTILE["img"], "__proto__", "xxx"])
    assert chat.page.evaluate("window.ran ?? null") is None
    assert chat.widest() == 0


NESTED = {
    "quotes": ">" * 2000 + " x",
    "lists": "".join("  " * i + "- x\n" for i in range(300)),
    "emphasis": "*_" * 2000 + "x",
    "brackets": "[" * 5000 + "x" + "](" * 5000,
    "backticks": " ".join("`" * i for i in range(1, 100)),
    "tags": "<b>" * 2000 + "x",
    "table": "|" * 1000 + "\n" + "|-" * 1000 + "|\n" + "|" * 1000,
    "one word": "x" * 20_000,
    "links": "<http://" * 1000,
    "formula": "$" + "{" * 1900 + "x" + "}" * 1900 + "$",
    "formulas": "$$" * 1500 + "\\(" * 1500,
}


def test_nesting_without_end_is_shown_and_the_page_stays_alive(chat: Chat, script: Script) -> None:
    for name, text in NESTED.items():
        answer = chat.shown(text)
        is_harmless(answer.evaluate(LOOK))
        assert chat.copied(answer) == text, name
        assert chat.widest() == 0, name
    assert "fine" in chat.copied(chat.retold("fine"))


# -- Markdown: pieces, code, lists, tables ----------------------------------------------------------------------------

TEXTS = [
    *["word", "a", "x", "é", "it's", "lt", "amp", "www", "ample", "org", "com", "https", "javascript:", "mailto:"],
    *[" the", " ", "  ", "\n", "\n\n", "- ", "> ", "\n---\n", "\n|-|-|\n", "]: ", "a@b.", "](https://ex", "https://"],
    *["**", "~~", "```", "](", "![", "</", *"*_`[]()!./@&;<>#1|\\':"],
    *["\n\n", "[a]", "\n\n[a]: https://x.y\n", "$$\nx\n$$\n", "```js\nlet x\n```\n", "* a\n", "<think>", "</think>"] * 3,
    *["<img src=x onerror=window.ran=1>", "<script>", "</script>", "<svg>", "<style>", "<b ", " onclick=window.ran=1", "<a href="],
    *["<!--", "-->", "<![CDATA[", "]]>", "&#x3c;", "data:text/html,", "\\href{javascript:", "\\frac{", "\\(", "\\)", "$"],
    *["\ue0000\ue001", "\ue002", "Ω", "\u202e"],
]  # fmt: skip
# Not made smaller: each example is 200 short answers, and the one that differs is named.
MANY = settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))
DRAWN = """
async texts => {
  const {markdown} = await import(new URL("markdown.js", document.querySelector("script[type=module]").src));
  return texts.map(text => markdown(text).innerHTML);
}
"""
GROW = f"""
async cases => {{
  const {{markdown}} = await import(new URL("markdown.js", document.querySelector("script[type=module]").src));
  return cases.map(pieces => {{
    let element;
    for (let n = 1; n <= pieces.length; ++n) element = markdown(pieces.slice(0, n).join(""), null, element);
    return [element.outerHTML, markdown(pieces.join("")).outerHTML, ({LOOK})(element)];
  }});
}}
"""


def test_an_answer_that_came_in_pieces_is_the_whole_one_and_harmless(open_page: Open) -> None:
    page = open_page(greedy=False).page

    @settings(MANY, max_examples=6)
    @given(st.lists(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=14), min_size=200, max_size=200))
    def check(cases: list[list[str]]) -> None:
        for case, (grown, whole, found) in zip(cases, page.evaluate(GROW, cases)):
            assert grown == whole, case
            is_harmless(found)

    check()
    page.wait_for_timeout(100)  # an onerror comes later
    assert page.evaluate("window.ran ?? null") is None


def test_html_is_shown_as_text_behind_a_script_too(open_page: Open) -> None:
    page = open_page(greedy=False).page
    for text in (
        "so <script>amp<img src=x onerror=window.ran=1>",
        "a <pre>b < c <i",
        "<script> x <b>y</b> </script> <u>z",
    ):
        (drawn,) = page.evaluate(DRAWN, [text])
        assert html.unescape(re.sub("<[^>]*>", "", drawn)).strip() == text


PYTHON = """@cache
def answer(n: int = 42) -> str:
    return f"the number is {n:,}"  # of the key 3de5-aa57
"""


def test_code_has_colours_its_language_and_a_button_that_copies_it(chat: Chat, script: Script) -> None:
    shell = "$ pip install 'x<2' && echo done"
    unknown = "klingon", "constructor", "__proto__", "x" * 300
    answer = chat.told("".join(f"```{language}\nif <b> then\n```\n" for language in unknown))
    assert answer.locator("pre").all_text_contents() == ["if <b> then\n"] * len(unknown) and chat.widest() == 0
    answer = chat.told(f"So:\n\n```python\n{PYTHON}```\n\n```sh\n{shell}\n```\n\n```\nplain *text*\n```\n")
    code = answer.locator("pre")
    assert code.all_text_contents() == [PYTHON, shell + "\n", "plain *text*\n"]
    colours = code.first.locator("span").evaluate_all("all => all.map(one => getComputedStyle(one).color)")
    assert len(set(colours)) >= 4
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
    box = chat.named("group", "Code: JavaScript", chat.answers)
    expect(chat.answers.locator("pre")).to_contain_text("const a")
    expect(chat.answers.get_by_role("group").filter(has_text="Reasoning")).not_to_have_attribute("open", "")
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


def test_what_is_a_formula_and_what_is_not(open_page: Open) -> None:
    found = {}
    for text, drawn_as in zip(FORMULAS, open_page(greedy=False).page.evaluate(DRAWN, [*FORMULAS])):
        seen = [html.unescape(re.sub("<[^>]*>", "", one)) for one in re.findall("(?s)<math.*?</math>", drawn_as)]
        found[text] = [re.sub("[\n\u2061]", "", one).replace("\xa0", " ") for one in seen]
    assert found == FORMULAS


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
