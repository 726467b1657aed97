"""The page of `pypcd serve` in a real Chromium, found by role and accessible name as a screen reader finds it.

Every page is watched: an error or a warning on its console, an exception, a violation of its content security policy or a
request to anywhere but its server fails the test that opened it. `Chat` knows by which names the parts of the page are found;
`Script` is a server of answers that a test makes up. Nothing here knows what the page should do.

PYPCD_PAGE names a folder with the page to test in place of the one in the executable.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serving import BASE, answered, ready

from pypcd.evaluation.tasks.kv import KV_SHORT
from pypcd.server import Server

CHROMIUM = os.environ.get("PYPCD_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
HOW = (
    "apt-get install --no-install-recommends chromium (or PYPCD_CHROMIUM=/path/to/chrome), scripts/install test browser, "
    "then scripts/test tests/server/test_page*.py"
)
if not CHROMIUM:
    pytest.skip(f"the page is tested in Chromium, which is not here: {HOW}", allow_module_level=True)
try:
    from axe_playwright_python.base import AXE_SCRIPT
    from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect, sync_playwright
except ImportError:
    pytest.skip(f"the page is tested with Playwright and axe-core, which are not here: {HOW}", allow_module_level=True)

ENDLESS = ["--logit-bias", "2-inf"]  # an answer has no end of its own
SECONDS = 20.0  # for one expectation, on a machine that is busy
expect.set_options(timeout=SECONDS * 1000)

Open = Callable[..., "Chat"]


def serve(*options: str, **given: Any) -> contextlib.AbstractContextManager[Server]:
    """A block in which a server runs that has the page."""
    page = os.environ.get("PYPCD_PAGE")
    path = ["--path", os.path.abspath(page)] if page else []
    return ready(*path, *options, **{"pcd": BASE, "parallel": 4, **given})


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    with serve() as server:
        yield server


# Not for the session: Playwright's event loop runs as long as it is open, and other tests have loops of their own.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0  # for which Chromium's sandbox does not start
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            chromium_sandbox=not is_root,
            args=["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],  # nothing can leave, whatever is tried
        )
        yield browser
        browser.close()


@pytest.fixture
def script() -> Iterator[Script]:
    """Answers that the test makes up."""
    made = Script()
    with ThreadingHTTPServer(("127.0.0.1", 0), made.handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield made
        finally:
            for stream in made.streams:
                stream.just_end()
            server.shutdown()
            thread.join()


DROP = """(element, files) => {
  const transfer = new DataTransfer();
  for (const [name, type, data] of files) {
    const bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0));
    transfer.items.add(new File([bytes], name, {type}));
  }
  for (const what of ['dragenter', 'dragover', 'drop'])
    element.dispatchEvent(new DragEvent(what, {dataTransfer: transfer, bubbles: true, cancelable: true}));
}"""


def came_about(page: Page, condition: Callable[[], Any]) -> bool:
    """Whether something is so in time, while the page goes on."""
    for _ in range(int(SECONDS * 50)):
        if condition():
            return True
        page.wait_for_timeout(20)
    return False


class Watch:
    """What the pages of a context did that they should not."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.requests: list[str] = []
        self.faults: list[str] = []
        self.allowed: list[str] = []
        self._context = context
        self._origin = url
        context.on("request", lambda request: self._request(request.url))
        context.on("page", self._follow)
        context.expose_binding("pypcdViolation", lambda _, text: self.faults.append(f"policy: {text}"))
        context.add_init_script(
            "document.addEventListener('securitypolicyviolation', "
            "e => pypcdViolation(`${e.violatedDirective} ${e.blockedURI} ${e.sample}`))"
        )

    def _follow(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.faults.append(f"exception: {error}"))
        page.on("crash", lambda _: self.faults.append("crash"))
        page.on("websocket", lambda socket: self._request(socket.url))
        page.on(
            "console",
            lambda message: (
                message.type in ("error", "warning") and self.faults.append(f"console: {message.type}: {message.text}")
            ),
        )

    def _request(self, url: str) -> None:
        self.requests.append(url)
        url = url.removeprefix("blob:")
        if not url.startswith(("data:", self._origin + "/")):
            self.faults.append(f"request: {url}")

    def allow(self, *patterns: str) -> None:
        """Faults that the test is about: they have to come."""
        self.allowed += patterns

    def check(self) -> None:
        """No fault but those allowed, and each of these. Chromium tells of a request's end after what made it end."""
        if self._context.pages:
            came_about(self._context.pages[0], lambda: not self.missing())
        left = [fault for fault in self.faults if not any(re.search(pattern, fault) for pattern in self.allowed)]
        assert not left, left
        missing = self.missing()
        assert not missing, f"expected, and did not come: {missing}; there were {self.faults}"

    def missing(self) -> list[str]:
        """Those that have not come yet."""
        return [pattern for pattern in self.allowed if not any(re.search(pattern, fault) for fault in self.faults)]


@pytest.fixture
def open_page(chromium: Browser, served: Server) -> Iterator[Open]:
    """open_page(server, script, greedy, width=1280, **what a browser context takes): a page in a context of its own, watched.

    With a script the answers are the script's; without one they are the server's, greedy and short unless `greedy` is False."""
    opened: list[tuple[BrowserContext, Watch]] = []

    def make(
        server: Server = served, script: Script | None = None, *, width: int = 1280, greedy: bool = True, **kwargs: Any
    ) -> Chat:
        given = {"reduced_motion": "reduce", "locale": "en-GB", "viewport": {"width": width, "height": 740}, **kwargs}
        context = chromium.new_context(**given)
        context.set_default_timeout(SECONDS * 1000)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        opened.append((context, Watch(context, server.url)))
        chat = Chat(context.new_page(), opened[-1][1], server)
        chat.go()
        if script:
            chat.play(script)
        elif greedy:
            chat.set(temperature=0, longest_answer=24)
        return chat

    try:
        yield make
        for _, watch in opened:
            watch.check()
    finally:
        for context, _ in opened:
            context.close()


@pytest.fixture
def chat(open_page: Open, request: pytest.FixtureRequest) -> Chat:
    """One open page. If the test takes `script` too, the answers are the script's."""
    return open_page(script=request.getfixturevalue("script") if "script" in request.fixturenames else None)


class Chat:
    """One open page. Names of things are those that the page tells to a screen reader."""

    script: Any = None  # the Script by which its answers are made up

    def __init__(self, page: Page, watch: Watch, server: Server) -> None:
        self.page, self.watch, self.server = page, watch, server
        self.message = self.named("textbox", "Message")
        self.answers = self.named("article", "Answer")
        self.questions = self.named("article", "You")
        self.alert = page.get_by_role("alert")

    def named(self, role: Any, name: str, within: Locator | None = None) -> Locator:
        return (within or self.page).get_by_role(role, name=name, exact=True)

    def button(self, name: str, within: Locator | None = None) -> Locator:
        return self.named("button", name, within)

    def go(self) -> None:
        self.page.goto(self.server.url + "/")
        expect(self.named("combobox", "Model").locator("option").or_(self.alert).first).to_be_attached()

    def again(self) -> Chat:
        """Another page of the same browser."""
        other = Chat(self.page.context.new_page(), self.watch, self.server)
        other.script = self.script
        other.go()
        return other

    def opened(self, button: Locator, name: str) -> Locator:
        """The dialog that a button opens."""
        button.click()
        dialog = self.named("dialog", name)
        expect(dialog).to_be_visible()
        return dialog

    def settings(self) -> Locator:
        return self.opened(self.button("Settings"), "Settings")

    def done(self, dialog: Locator) -> None:
        self.button("Done", dialog).click()
        expect(dialog).to_be_hidden()

    def set(self, **values: Any) -> None:
        """Fill in fields of the settings: top_p=0.5 is "Top p"."""
        dialog = self.settings()
        self._fill(dialog, values)
        self.done(dialog)

    def _fill(self, dialog: Locator, values: dict[str, Any]) -> None:
        for name, value in values.items():
            label = name.capitalize().replace("_", " ").replace("Api", "API")
            field = dialog.get_by_label(re.compile(rf"^{label}\b|\({name}\)"))
            if field.evaluate("field => field.localName") == "select":
                field.select_option(label=value)
            else:
                field.fill(str(value))
                field.blur()

    def pcd(self, label: str, **values: Any) -> None:
        """Choose the PCD of the next answer: of these values, if it is "^custom"."""
        dialog = self.pcd_dialog()
        dialog.get_by_role("radio", name=re.compile(label)).check()
        self._fill(dialog, values)
        self.done(dialog)

    def choices(self, dialog: Locator) -> list[list[str]]:
        """The labels of the PCD that may be chosen: each name, and what is said of it."""
        found = dialog.get_by_role("radio").evaluate_all("all => all.map(one => one.labels[0].innerText)")
        return [re.split(r"\n+", text) for text in found]

    def pcd_dialog(self) -> Locator:
        return self.opened(self.page.get_by_role("button", name=re.compile("^PCD:")), "PCD")

    def menu(self) -> Locator:
        """The list of conversations: beside the talk, or in a drawer that is opened."""
        nav = self.named("navigation", "Conversations")
        opener = self.button("Conversations")
        if not nav.is_visible() and opener.is_visible():
            opener.click()
        expect(nav).to_be_visible()
        return nav

    def send(self, text: str) -> None:
        self.message.fill(text)
        self.message.press("Enter")

    def compare(self, text: str) -> Locator:
        """Have the answers without and with PCD written beside one another."""
        self.message.fill(text)
        self.button("Compare").click()
        return self.named("group", "Comparison")

    def edit(self, question: Locator) -> Locator:
        """The field in which a question is edited."""
        self.button("Edit", question).click()
        return self.named("textbox", "Edit message")

    def ask(self, text: str) -> Locator:
        """Send, and wait for the whole answer."""
        n = self.answers.count()
        self.send(text)
        expect(self.answers).to_have_count(n + 1)
        return self.finished()

    def begin(self, text: str = "Say") -> Script.Stream:
        """Send; the answer that the test makes up."""
        self.send(text)
        return self.script.next(self)

    def told(self, *words: str | bytes | dict[str, Any], text: str = "Say") -> Locator:
        """Ask, have these words answered, and wait for the end."""
        self.send(text)
        return self._told(*words)

    def retold(self, *words: str | bytes | dict[str, Any]) -> Locator:
        """Another version of the last answer."""
        self.button("Retry", self.answers.last).click()
        return self._told(*words)

    def shown(self, *words: str | bytes | dict[str, Any]) -> Locator:
        """An answer of these words; all in one talk would be longer than the context, so each is a version of the last."""
        return self.retold(*words) if self.answers.count() else self.told(*words)

    def talk(self, *pairs: tuple[str, str]) -> None:
        """Questions, each with its answer, of which each word is a token."""
        for text, answer in pairs:
            self.told(*re.findall(r"\s?\S+", answer), text=text)

    def _told(self, *words: str | bytes | dict[str, Any]) -> Locator:
        stream = self.script.next(self)
        expect(self.button("Stop")).to_be_visible()
        stream.say(*words).end()
        return self.finished()

    def finished(self) -> Locator:
        """The last answer, when it is complete."""
        expect(self.button("Send")).to_be_visible()
        last = self.answers.last
        expect(last).not_to_have_attribute("aria-busy", "true")
        return last

    def copied(self, article: Locator) -> str:
        """The text of a question or an answer, as its button copies it."""
        self.page.evaluate("navigator.clipboard.writeText('nothing was copied')")
        self.button("Copy", article).click()
        self.until(lambda: self._clipboard() != "nothing was copied")
        return self._clipboard()

    def _clipboard(self) -> str:
        return self.page.evaluate("navigator.clipboard.readText()")

    def new(self) -> None:
        self.button("New conversation", self.menu()).click()

    def titles(self) -> list[str]:
        """Of the conversations, from top to bottom."""
        return list(self.menu().locator("li .title").evaluate_all("all => all.map(one => one.title)"))

    def drop(self, *files: tuple[str, str, str | bytes]) -> None:
        """Files of a name, a type and a content, dropped on the message."""
        coded = [
            (name, kind, base64.b64encode(data.encode() if isinstance(data, str) else data).decode())
            for name, kind, data in files
        ]
        self.message.evaluate(DROP, coded)

    def attach(self, *files: tuple[str, str, str | bytes]) -> None:
        """Drop files, and wait until they stand beside the message."""
        self.drop(*files)
        for name, _, _ in files:
            expect(self.button(f"Remove {name}")).to_be_visible()

    def sent(self, route: str) -> list[Any]:
        """The bodies of the requests to a route, from now on."""
        bodies: list[Any] = []
        self.page.on("request", lambda it: bodies.append(it.post_data_json) if it.url.endswith(route) else None)
        return bodies

    def choose(self, button: str, path: Path) -> None:
        """Give a file to the button that asks for one."""
        with self.page.expect_file_chooser() as chooser:
            self.button(button).click()
        chooser.value.set_files(path)

    def removers(self) -> Locator:
        """The buttons that take a file out again."""
        return self.page.get_by_role("button", name=re.compile("^Remove "))

    def exported(self, path: Path) -> dict[str, Any]:
        nav = self.menu()
        with self.page.expect_download() as download:
            self.button("Export", nav).click()
        assert download.value.suggested_filename.endswith(".json")
        download.value.save_as(path)
        return json.loads(path.read_text(encoding="utf-8"))

    def load(self, path: Path) -> None:
        self.menu()
        self.choose("Import", path)

    def tokens(self, answer: Locator) -> Locator:
        """The buttons of an answer's tokens, in order."""
        toggle = self.button("Tokens", answer)
        if toggle.get_attribute("aria-pressed") != "true":
            toggle.click()
        expect(toggle).to_have_attribute("aria-pressed", "true")
        return answer.get_by_role("group", name=re.compile("^Tokens")).get_by_role("button")

    def open_token(self, token: Locator) -> Locator:
        return self.opened(token, "Token")

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait, while the page goes on, for something that is not in it."""
        assert came_about(self.page, condition), "it did not come about"

    def play(self, script: Script) -> None:
        """From now on its answers are made up. The real server still counts tokens and knows the template."""

        def elsewhere(route: Route) -> None:
            route.continue_(url=script.url + urlsplit(route.request.url).path)

        self.script = script
        for route in ("**/completion", "**/v1/chat/completions"):
            self.page.context.route(route, elsewhere)

    def axe(self) -> list[str]:
        """What axe-core finds of serious or critical faults on the page as it is now."""
        self.page.evaluate(AXE_SCRIPT)
        found = self.page.evaluate("axe.run({resultTypes: ['violations']})")["violations"]
        return [
            f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes']]}"
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    def widest(self) -> int:
        """How many pixels the page scrolls sideways."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


class Script:
    """A server of answers that a test makes up, sent when the test says so."""

    url: str

    class Stream:
        """One request and its answer."""

        def __init__(self, body: dict[str, Any]) -> None:
            self.body = body
            self.is_left = threading.Event()  # the page is not there any more
            self._n_tokens, self._status = 0, 200
            self._parts: queue.Queue[bytes | None] = queue.Queue()  # of a chunked body; None: its end

        def say(self, *parts: str | bytes | dict[str, Any]) -> Script.Stream:
            """Texts, each a token of the answer; whole events; or bytes as they are."""
            for part in parts:
                if isinstance(part, str):
                    part = event(part)
                if isinstance(part, dict):
                    self._n_tokens += len(part.get("tokens", ()))
                    part = {"tokens_predicted": self._n_tokens, **part}
                    part = as_chat(part) if "messages" in self.body else part
                    part = b"data: %s\n\n" % json.dumps(part).encode()
                self._parts.put(chunk(part))
            return self

        def end(self, **timings: Any) -> Script.Stream:
            """The last event, with TIMINGS and these, and the end."""
            last = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "timings": {**TIMINGS, **timings}}
            self.say(last).just_end()
            return self

        def just_end(self) -> None:
            self._end(chunk(b""))

        def break_off(self) -> None:
            """The connection ends in the middle of a chunk."""
            self._end(b"ffff\r\ndata: {")

        def fail(self, status: int, body: bytes) -> None:
            """An error in place of an answer."""
            self._status = status
            self._end(chunk(body) + chunk(b""))

        def _end(self, last: bytes) -> None:
            self._parts.put(last)
            self._parts.put(None)

        def answer(self, handler: Any) -> None:
            """Sends the parts as they come, and now and then a comment, which shows whether somebody listens."""
            part = self._parts.get(timeout=SECONDS)
            handler.send_response(self._status)
            handler.send_header("Content-Type", "text/event-stream")
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            while part is not None:
                handler.wfile.write(part)
                try:
                    part = self._parts.get(timeout=0.05)
                except queue.Empty:
                    part = chunk(b": alive\n\n")

    def __init__(self) -> None:
        self.streams: list[Script.Stream] = []
        self._n_taken = 0
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_POST(self) -> None:
                stream = Script.Stream(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                script.streams.append(stream)
                try:
                    stream.answer(self)
                except (BrokenPipeError, ConnectionResetError):
                    stream.is_left.set()
                self.close_connection = True

        self.handler = Handler

    def next(self, chat: Chat) -> Script.Stream:
        """The request that the page makes next, or has just made."""
        chat.until(lambda: len(self.streams) > self._n_taken)
        self._n_taken += 1
        return self.streams[self._n_taken - 1]


TIMINGS = {"prompt_n": 3, "cache_n": 0, "prompt_ms": 1.0, "prompt_per_second": 3000.0, "predicted_n": 2}
TIMINGS |= {"predicted_ms": 1.0, "predicted_per_second": 2000.0}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def prompt_of(server: Server, *texts: str, system: str = "") -> str:
    """The prompt for a talk of these texts, yours and the answers in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return answered(server, "/apply-template", {"messages": messages})["prompt"]


def as_chat(part: dict[str, Any]) -> dict[str, Any]:
    """A part of an answer of /completion, as /v1/chat/completions sends it."""
    logprobs = {"content": part.get("completion_probabilities", [])}
    end = "stop" if part.get("stop") else None
    choice = {"delta": {"content": part.get("content", "")}, "logprobs": logprobs, "finish_reason": end}
    return {"choices": [choice], "timings": part.get("timings")}


def event(text: str, token_id: int = 300, **fields: Any) -> dict[str, Any]:
    """What the server sends for one token of an answer, with one candidate; fields of the token."""
    option = {"id": token_id, "token": text, "bytes": [*text.encode()], "logprob": -0.1}
    token = {**option, "top_logprobs": [option], **fields}
    return {"content": text, "tokens": [token_id], "stop": False, "completion_probabilities": [token]}


def candidates(*ids: int) -> list[dict[str, Any]]:
    """For an event's `top_logprobs`: the texts are " w1" and so on."""
    return [{"id": n, "token": f" w{n}", "bytes": [*f" w{n}".encode()], "logprob": -float(n)} for n in ids]


def question(n_pairs: int, seed: int = 0) -> tuple[str, str]:
    """A question that the demo model was trained on, and its right answer."""
    sample = next(iter(KV_SHORT.questions(1, n_pairs, seed)))
    return sample.prompt.begun.rstrip(), sample.answers[0]
