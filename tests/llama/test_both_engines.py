"""Every way to get words, tokens or rows out of a pypcd.Llama shows the same with the engine "stock" as with "native"."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import pytest
from conftest import TOKENS, Load, Tiny, native_row, tolerance
from tiny_gguf import CHAT_TEMPLATE

import pypcd

PROMPT = "bada what? The value of the third key is not here, and neither is the second."
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
SHORT: dict[str, Any] = {"max_tokens": 16, "temperature": 0.0}


def text(answer: Any) -> Any:
    """What is said, without ids and times."""
    if not isinstance(answer, dict):
        return [text(part) for part in answer]
    return [{k: v for k, v in choice.items() if k != "index"} for choice in answer["choices"]]


def grammar() -> Any:
    return llama_cpp.LlamaGrammar.from_string('root ::= [a-z]+ " " [a-z]+', verbose=False)


def processed(llm: pypcd.Llama) -> Any:
    seen: list[np.ndarray] = []

    def best_but_one(tokens: Any, row: Any) -> Any:
        seen.append(row[:40].copy())
        row[int(row.argmax())] = -np.inf
        return row

    answer = llm(PROMPT, logits_processor=llama_cpp.LogitsProcessorList([best_but_one]), **SHORT)
    return text(answer), np.stack(seen)


def continued(llm: pypcd.Llama) -> Any:
    """A prompt whose beginning is in memory, one that is shorter, and one again."""
    return [text(llm(prompt, **SHORT)) for prompt in (PROMPT, PROMPT + " And the first?", PROMPT[:30], PROMPT)]


def restored(llm: pypcd.Llama) -> Any:
    llm.eval(TOKENS[:40])
    state = llm.save_state()
    rows = []
    for token in TOKENS[40:43]:
        llm.eval(TOKENS[60:63])
        llm.load_state(state)
        llm.eval([token])
        rows.append(native_row(llm))
    return np.stack(rows)


def copied(llm: pypcd.Llama) -> Any:
    copy = pickle.loads(pickle.dumps(llm))
    assert (copy.engine, copy.pcd) == (llm.engine, llm.pcd)
    answer = text(copy(PROMPT, **SHORT))
    copy.close()
    return answer


CALLS: dict[str, tuple[Callable[[pypcd.Llama], Any], dict[str, Any]]] = {
    "completion": (lambda llm: text(llm(PROMPT, **SHORT)), {}),
    "logprobs": (lambda llm: text(llm(PROMPT, logprobs=4, echo=True, **SHORT)), {"logits_all": True}),
    "chat stream": (lambda llm: text(llm.create_chat_completion(MESSAGES, stream=True, **SHORT)), {}),
    "grammar": (lambda llm: text(llm(PROMPT, grammar=grammar(), pcd=llm.pcd, **SHORT)), {}),
    "processor": (processed, {}),
    "small batches": (lambda llm: text(llm(PROMPT, **SHORT)), {"n_batch": 16, "n_ubatch": 8}),
    "prefixes": (continued, {}),
    "state": (restored, {}),
    "pickle": (copied, {}),
}
SETTINGS: list[dict[str, Any]] = [
    {"perturbation": "none", "window": 12, "beta": 1.5},
    {"perturbation": "none", "window": 12, "relative_top": 0.3, "min_context": 60, "min_entropy": 7.5},
    {"perturbation": "none", "window": 20, "gamma": 5, "min_first_entropy": 5.0, "evaluation": "alternate"},
    {"cache": "shared", "relative_top": 0.05},
]


def same(a: Any, b: Any, allowed: float) -> bool:
    """Equal but for rounding of numbers."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k], allowed) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y, allowed) for x, y in zip(a, b))
    if isinstance(a, (float, np.floating, np.ndarray)):
        return bool(np.allclose(a, b, rtol=0, atol=allowed))
    return bool(a == b)


@pytest.mark.parametrize("setting", SETTINGS, ids=["window", "floors", "first", "shared"])
@pytest.mark.parametrize("name", CALLS)
def test_what_one_shows_the_other_shows(name: str, setting: dict[str, Any], tiny: Tiny, load: Load) -> None:
    call, options = CALLS[name]
    path, shown = tiny("llama", chat_template=CHAT_TEMPLATE), []
    for engine in ("native", "stock"):
        llm = load(path, setting, engine=engine, **options)
        shown.append(call(llm))
        stats = llm.pcd_stats()
        assert stats.n_twins or setting is not SETTINGS[0] or name == "pickle"
    assert same(*shown, 4 * tolerance(path)), shown


def test_each_call_shows_something(tiny: Tiny, load: Load) -> None:
    """With PCD it says something else than without, or the test above shows nothing."""
    path = tiny("llama", chat_template=CHAT_TEMPLATE)
    for name, (call, options) in CALLS.items():
        shown = [call(load(path, setting, engine="stock", **options)) for setting in (SETTINGS[0], False)]
        assert not same(*shown, 4 * tolerance(path)), name
