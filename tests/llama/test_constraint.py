"""Answers under a grammar: plain unless their own call asks for PCD, however the grammar came about.

Plain answers are held to a model with PCD off, contrasted ones to the rows that pypcd.Llama shows, masked by hand."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import Load, Tiny
from tiny_gguf import CHAT_TEMPLATE

import pypcd
from pypcd import engine
from pypcd.llama import LEFT_PLAIN

PROMPT = "The keys are red, blue and green. The first of the keys is"
MESSAGES = [{"role": "user", "content": PROMPT}]
SETTING = pypcd.PCDConfig(perturbation="none", window=8, beta=3.0, evaluation="fused")
LETTERS = 'root ::= "<" [a-z] [a-z] [a-z] [a-z] [a-z] [a-z] [a-z] [a-z] ">"'
BEGUN = re.compile(b"<[a-z]{0,8}|<[a-z]{8}>")  # a beginning of it
SCHEMA = {
    "type": "object",
    "properties": {"key": {"type": "string", "pattern": "^[a-z]{12}$"}},
    "required": ["key"],
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}


def grammar(text: str = LETTERS) -> Any:
    return llama_cpp.LlamaGrammar.from_string(text, verbose=False)


def said(made: Any) -> str:
    """The text of a completion, a chat's answer or a tool's arguments, whole or as a stream."""
    if not isinstance(made, dict):
        return "".join(map(said, made))
    choice = made["choices"][0]
    message = choice.get("message") or choice.get("delta")
    if message is None:
        return str(choice["text"])
    calls = message.get("tool_calls") or [{"function": {"arguments": ""}}]
    return (message.get("content") or "") + calls[0]["function"]["arguments"]


def drawn(llm: pypcd.Llama, *args: Any, **kwargs: Any) -> str:
    tokens = [token for token, _ in zip(llm.generate(llm.tokenize(PROMPT.encode()), *args, **kwargs), range(40))]
    return b"".join(engine.token_bytes(llm, token) for token in tokens).decode()


ALL: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
JSON = {**ALL, "response_format": {"type": "json_object", "schema": SCHEMA}}
OPENAIS = {**ALL, "response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}}
FORCED = {**ALL, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "find"}}}
WAYS: dict[str, Callable[..., str]] = {
    "completion": lambda llm, **kw: said(llm.create_completion(PROMPT, grammar=grammar(), **ALL, **kw)),
    "stream": lambda llm, **kw: said(llm(PROMPT, grammar=grammar(), stream=True, **ALL, **kw)),
    "generate": lambda llm, **kw: drawn(llm, temp=0.0, grammar=grammar(), **kw),
    "by place": lambda llm, **kw: drawn(
        llm, 40, 0.95, 0.05, 1.0, 0.0, 1.0, True, 0.0, 0.0, 1.0, 0, 0.1, 5.0, True, None, None, grammar(), **kw
    ),
    "chat": lambda llm, **kw: said(llm.create_chat_completion(MESSAGES, grammar=grammar(), **ALL, **kw)),
    "json": lambda llm, **kw: said(llm.create_chat_completion(MESSAGES, **JSON, **kw)),
    "json as OpenAI has it": lambda llm, **kw: said(llm.create_chat_completion(MESSAGES, **OPENAIS, **kw)),
    "json stream": lambda llm, **kw: said(llm.create_chat_completion(MESSAGES, stream=True, **JSON, **kw)),
    "forced tool": lambda llm, **kw: said(llm.create_chat_completion(MESSAGES, **FORCED, **kw)),
    "function": lambda llm, **kw: said(
        llm.create_chat_completion(MESSAGES, functions=[TOOL["function"]], function_call={"name": "find"}, **ALL, **kw)
    ),
}


@pytest.fixture
def pair(tiny: Tiny, load: Load) -> tuple[pypcd.Llama, pypcd.Llama]:
    """A model with PCD on, and one with it off."""
    path = tiny("llama", chat_template=CHAT_TEMPLATE)
    return load(path, SETTING), load(path, False)


# -- the default ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_it_is_plain_and_the_calls_own_setting_wins(way: str, pair: tuple[pypcd.Llama, pypcd.Llama]) -> None:
    llm, stock = pair
    run = WAYS[way]
    plain, contrasted = run(stock), run(stock, pcd=SETTING)
    assert plain != contrasted, "or this shows nothing"
    assert run(llm) == plain and llm.pcd_stats().n_constrained == 1
    for setting in (SETTING, llm.pcd):
        assert run(llm, pcd=setting) == contrasted
    for setting in (False, {"beta": 0.0}, {"gamma": 1}):
        assert run(llm, pcd=setting) == plain
    assert llm.pcd_stats().n_constrained == 1
    assert run(llm) == plain and llm.pcd_stats().n_constrained == 2
    if way.startswith("json"):
        for text in (plain, contrasted):
            value = json.loads(text)
            assert list(value) == ["key"] and re.fullmatch("[a-z]{12}", value["key"])
    assert llm.pcd == SETTING


@pytest.mark.parametrize("engine_name", ["native", "stock"])
def test_what_a_contrast_changes_and_that_it_is_left_out(engine_name: str, tiny: Tiny, load: Load) -> None:
    """The value by hand: the best letter of L, and of (1 + beta) L - beta L*, at each step under the grammar."""
    llm = load(tiny("llama"), SETTING, engine=engine_name)
    pieces = [engine.token_bytes(llm, token) for token in range(llm.n_vocab())]
    for beta, pcd in ((0.0, None), (3.0, SETTING)):
        llm.reset()
        llm.eval(llm.tokenize(PROMPT.encode()))
        text = b""
        while not text.endswith(b">"):
            rows = llm.pcd_logits()
            assert rows.local is not None
            best = np.argsort(-rows.standard)[:30]  # gamma
            row = np.full(llm.n_vocab(), -np.inf)
            row[best] = (1 + beta) * rows.standard[best] - beta * rows.local[best]
            known = [token for token, piece in enumerate(pieces) if piece and BEGUN.fullmatch(text + piece)]
            row = row if np.isfinite(row[known]).any() else rows.standard  # none of them is plausible
            chosen = max(known, key=lambda token, row=row: row[token])  # type: ignore[misc]
            text += pieces[chosen]
            llm.eval([chosen])
        assert said(llm(PROMPT, grammar=grammar(), **ALL, pcd=pcd)) == text.decode(), (beta, pcd)


def test_it_is_said_once_in_each_model(pair: tuple[pypcd.Llama, pypcd.Llama], caplog: pytest.LogCaptureFixture) -> None:
    llm, stock = pair
    with caplog.at_level(logging.WARNING, logger="pypcd"):
        for run in WAYS.values():
            run(stock)
            run(llm, pcd="paper")
        assert not caplog.messages
        for run in WAYS.values():
            run(llm)
    assert caplog.messages == [LEFT_PLAIN]
    assert llm.pcd_stats().n_constrained == len(WAYS) and stock.pcd_stats().n_constrained == 0


def test_a_stream_leaves_other_calls_their_setting(pair: tuple[pypcd.Llama, pypcd.Llama]) -> None:
    """Between two steps of an answer that is left plain the model's setting holds."""
    llm, stock = pair
    plain = said(stock(PROMPT, grammar=grammar(), **ALL))
    stream = llm(PROMPT, grammar=grammar(), stream=True, **ALL)
    assert llm.pcd_stats().n_constrained == 0, "answers count when they begin"
    text = said(next(stream))
    assert llm.pcd == SETTING and llm.pcd_stats().n_constrained == 1
    text += said(stream)
    assert text == plain and llm.pcd == SETTING
    asked = llm(PROMPT, grammar=grammar(), stream=True, pcd=SETTING, **ALL)
    assert said(asked) == said(stock(PROMPT, grammar=grammar(), pcd=SETTING, **ALL))


def test_other_answers_are_contrasted_as_before(pair: tuple[pypcd.Llama, pypcd.Llama]) -> None:
    """Also with a logits processor, which may be anything: pcd=False says that it is a constraint."""
    llm, stock = pair
    allowed = np.array([bool(re.fullmatch(rb"[a-z]", engine.token_bytes(llm, t))) for t in range(llm.n_vocab())])

    def letters(ids: Any, row: Any) -> Any:
        row[~allowed] = -np.inf
        return row

    for kwargs in ({"grammar": None}, {"logits_processor": llama_cpp.LogitsProcessorList([letters])}):
        plain, contrasted = (said(stock(PROMPT, **ALL, **kwargs, pcd=pcd)) for pcd in (False, SETTING))
        assert (
            said(llm(PROMPT, **ALL, **kwargs)) == contrasted != plain == said(llm(PROMPT, **ALL, **kwargs, pcd=False))
        )
    assert llm.pcd_stats().n_constrained == 0
