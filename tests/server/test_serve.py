"""llama-server with PCD: each request's answer against pypcd.Llama with the same setting, alone and several at once."""

from __future__ import annotations

import dataclasses
import http.client
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import serving
from conftest import Tiny, contrasted, rounding_of
from serving import MESSAGES, PROMPTS, ROUTES, SETTINGS, N, ask, complete, counter, is_greedy, meant, ready, refused

import pypcd
from pypcd import PCDConfig
from pypcd.server import Server
from pypcd.settings.config import PRESETS, typed

# isort: split
from llama_cpp import LlamaGrammar

COUNTS = ("twins", "skipped", "contrasted", "changed", "constrained")


@pytest.fixture(scope="module")
def off() -> Iterator[Server]:
    """One that was started without --pcd."""
    with ready(parallel=2) as running:
        yield running


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_an_answer_and_what_pcd_did_are_those_of_llama(server: Server, llm: pypcd.Llama, name: str) -> None:
    n_tied, asked = 0, SETTINGS[name]
    for prompt in PROMPTS:
        answer = complete(server, prompt, pcd=asked)
        is_greedy(llm, prompt, asked, answer["tokens"])
        timings = answer["timings"]
        assert timings["pcd_twins"] + timings["pcd_skipped"] == (0 if name == "plain" else len(answer["tokens"]))
        if name == "late":
            n_early = max(0, min(len(answer["tokens"]), 30 - answer["tokens_evaluated"]))
            assert timings["pcd_skipped"] == n_early
        llm.pcd = serving.in_python(asked)
        llm.reset()
        if llm.create_completion(prompt, max_tokens=N, temperature=0)["choices"][0]["text"] != answer["content"]:
            n_tied += 1
            continue
        setting = llm.pcd and llm.pcd.replace(evaluation="auto")  # evaluation is the server's
        wanted = dataclasses.replace(llm.last_answer, setting=setting)
        assert timings["pcd_answer"] == str(wanted)
        assert timings["pcd_setting"] == typed(setting)
        counts = wanted.n_contrasted, wanted.n_skipped, wanted.n_changed
        assert (timings["pcd_contrasted"], timings["pcd_skipped"], timings["pcd_changed"]) == counts
    assert n_tied < len(PROMPTS)


def test_what_was_cached_under_another_setting_serves_the_next(server: Server, llm: pypcd.Llama) -> None:
    long = " ".join(PROMPTS) * 8
    for setting in (False, True, "cautious", False, "window", True):
        answer = complete(server, long, pcd=setting, id_slot=0)
        is_greedy(llm, long, setting, answer["tokens"])
    assert answer["timings"]["cache_n"] > 0


def test_a_connection_stays_after_a_stream(server: Server) -> None:
    body = json.dumps({"prompt": PROMPTS[0], "n_predict": 4, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.connect()
    connection.auto_open = 0  # a second request does not get a new one
    for _ in range(5):
        connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and b'"stop":true' in response.read()
    connection.close()


TEXT_OF: dict[str, Callable[[Any], str]] = {
    "/v1/completions": lambda answer: answer["choices"][0]["text"],
    "/v1/chat/completions": lambda answer: answer["choices"][0]["message"]["content"],
    "/v1/responses": lambda answer: answer["output"][0]["content"][0]["text"],
    "/v1/messages": lambda answer: answer["content"][0]["text"],
}


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_takes_the_field_and_the_suffix_and_says_what_pcd_did(server: Server, path: str) -> None:
    def said(**fields: Any) -> str:
        answer = serving.answered(server, path, {"temperature": 0, **ROUTES[path], **fields})
        told.update(answer["timings"])
        return TEXT_OF[path](answer)

    told: dict[str, Any] = {}
    strong = {"beta": 30.0}
    plain, cautious = said(pcd=False), said(pcd="cautious")
    assert said(model="demo:pcd-cautious") == cautious
    assert said(model="demo:pcd-cautious", pcd=False) == plain
    assert said(pcd=strong) != plain, "or this shows nothing"
    assert told["pcd_setting"] == "paper:beta=30.0" and told["pcd_changed"] > 0
    assert told["pcd_answer"].startswith("PCD (paper:beta=30.0) changed ")
    streamed = serving.last_timings(
        ask(server, path, {"temperature": 0, **ROUTES[path], "pcd": strong, "stream": True})[1]
    )
    assert all(streamed[name] == told[name] for name in told if name.startswith("pcd"))


# -- under a grammar --------------------------------------------------------------------------------------------------

RULES = "root ::= [a-z] [a-z] [a-z] [a-z] [a-z] [a-z] [a-z] [a-z]"
ENTRY = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{12}$"}}, "required": ["a"]}
CONSTRAINTS: list[tuple[str, dict[str, Any]]] = [
    ("/completion", {"grammar": RULES}),
    ("/completion", {"json_schema": ENTRY}),
    ("/v1/chat/completions", {"response_format": {"type": "json_schema", "json_schema": {"schema": ENTRY}}}),
    ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": ENTRY}}),
    ("/v1/completions", {"grammar": RULES}),
]


def constrained(server: Server, path: str, body: dict[str, Any], **fields: Any) -> tuple[str, dict[str, Any]]:
    """An answer's text and timings."""
    asked = {"prompt": PROMPTS[0], "messages": MESSAGES, "n_predict": 40, "temperature": 0, "timings_per_token": True}
    answer = serving.answered(server, path, {**asked, **body, **fields})
    return TEXT_OF.get(path, lambda answer: answer["content"])(answer), answer["timings"]


@pytest.mark.parametrize(("path", "body"), CONSTRAINTS)
def test_under_a_grammar_an_answer_is_plain_unless_its_request_asks(server: Server, path: str, body: Any) -> None:
    strong = {"beta": 30.0, "perturbation": "none", "window": 4}
    (plain, without), (on, with_pcd) = (constrained(server, path, body, pcd=pcd) for pcd in (False, strong))
    assert plain != on, "or this shows nothing"
    text, timings = constrained(server, path, body)
    assert text == plain and timings["pcd_twins"] == 0 and timings["pcd_answer"] == "PCD off"
    assert timings["pcd_constrained"] == timings["predicted_n"]
    assert without["pcd_constrained"] == without["pcd_twins"] == 0
    assert with_pcd["pcd_twins"] == with_pcd["predicted_n"] and with_pcd["pcd_constrained"] == 0
    for asked in ({"pcd": {}}, {"pcd": True}, {"model": "demo:pcd"}, {"model": "demo:pcd-cautious"}):
        text, timings = constrained(server, path, body, **asked)
        assert timings["pcd_twins"] + timings["pcd_skipped"] == timings["predicted_n"]
        assert timings["pcd_constrained"] == 0
        assert re.fullmatch("[a-z]{8}", text) if "grammar" in body else re.fullmatch("[a-z]{12}", json.loads(text)["a"])
    text, timings = constrained(server, path, body, pcd={"beta": 0.0})
    assert text == plain and timings["pcd_twins"] > 0


@pytest.mark.parametrize("name", ["plain", "server's", "fields"])
def test_under_a_grammar_the_tokens_are_those_of_llama(server: Server, llm: pypcd.Llama, name: str) -> None:
    asked = {"max_tokens": N, "temperature": 0, "grammar": LlamaGrammar.from_string(RULES, verbose=False)}
    wanted = llm.create_completion(
        PROMPTS[0], **asked, pcd=serving.in_python(SETTINGS[name])
    )  # which asks for it: else plain
    assert complete(server, PROMPTS[0], pcd=SETTINGS[name], grammar=RULES)["content"] == wanted["choices"][0]["text"]


def test_a_logit_bias_lifts_what_pcd_takes_out_and_bans(server: Server) -> None:
    asked = {"pcd": {"gamma": 2, "beta": 4.0}, "n_predict": 4}
    (first, *_) = complete(server, PROMPTS[0], **asked, n_probs=5)["completion_probabilities"]
    out = next(entry["id"] for entry in first["top_logprobs"] if entry["pcd"]["contrasted"] is None)
    assert complete(server, PROMPTS[0], **asked, logit_bias=[[out, 100]])["tokens"][0] == out
    assert complete(server, PROMPTS[0], **asked, logit_bias=[[first["id"], -100]])["tokens"][0] != first["id"]


def test_the_same_seed_draws_the_same(server: Server) -> None:
    drawn = {"pcd": {"gamma": 500}, "temperature": 1.5, "cache_prompt": False, "id_slot": 0}
    first, *again = (complete(server, PROMPTS[1], seed=seed, **drawn)["tokens"] for seed in (5, 5, 6, 7))
    assert again[0] == first and any(tokens != first for tokens in again)


def test_a_grammar_that_begins_later_leaves_the_setting(server: Server, llm: pypcd.Llama) -> None:
    """tool_choice "auto" makes such a grammar: until the model calls a tool, it writes as it likes."""
    later = {"grammar": RULES, "grammar_lazy": True, "grammar_triggers": [{"type": 1, "value": "<never written>"}]}
    answer = complete(server, PROMPTS[0], **later)
    is_greedy(llm, PROMPTS[0], {}, answer["tokens"])
    assert answer["timings"]["pcd_twins"] > 0 and answer["timings"]["pcd_constrained"] == 0


# -- requests ---------------------------------------------------------------------------------------------------------


def test_the_body_comes_before_the_suffix_and_that_before_the_server(server: Server, off: Server) -> None:
    for name in ("demo", "x:y", "gpt-4", "demonstration:x", "x:demo:y"):
        assert meant(server, model=name) == meant(server) and meant(server)["beta"] == 2.5
    for asked in ({"model": "demo:pcd-off"}, {"model": "demo:pcd-cautious", "pcd": False}, {"pcd": "off"}):
        assert meant(server, **asked) is False
    cautious = {"model": "demo:pcd-cautious"}
    for asked, wanted in (
        ({"model": "demo:pcd-off", "pcd": "window"}, {"window": 64}),
        (cautious, {"beta": 1.5}),
        ({**cautious, "pcd": None}, {"beta": 1.5}),
        ({**cautious, "pcd": "window"}, {"window": 64}),
        ({**cautious, "pcd": {"gamma": 5}}, {"beta": 1.5, "gamma": 5}),
        ({**cautious, "pcd": "paper:beta=3"}, {"beta": 3, "relative_top": 0}),
        ({"pcd": {}}, {"beta": 2.5}),
    ):
        got = meant(server, **asked)
        assert {name: got[name] for name in wanted} == wanted, asked
    for asked in ({"pcd": True}, {"pcd": "on"}, {"model": "demo:pcd"}, {"model": "demo:pcd-paper", "pcd": True}):
        for at in (server, off):
            assert meant(at, **asked) == meant(at, pcd="unsure"), "the recommended preset, whatever holds without it"
    assert meant(off) is False and meant(off, model="demo:pcd-off") is False
    assert meant(off, pcd="paper")["beta"] == 2.5
    assert meant(off, pcd={"gamma": 7, "window": None})["gamma"] == 7


def test_what_another_server_could_do_is_refused_with_a_sentence(server: Server) -> None:
    """What none could: test_serve_options.py."""
    for setting, word in (
        ({"alpha": 0.3}, "alpha is 0.3, this server's is 0.2; only `pypcd serve --pcd` can change it"),
        ({"cache": "separate"}, 'cache="separate" is evaluated by the stock engine alone; '),
        ({"evaluation": "alternate"}, 'evaluation is "alternate", this server\'s is "fused"'),
        ("tuned.json", "a request cannot name a file"),
        ("alpha=0.3", "write paper:alpha=0.3 or unsure:alpha=0.3"),
        ("paper:alpha=0.3", "alpha is 0.3, this server's is 0.2"),
        ("x" * 200000, "allowed: "),
    ):
        said = refused(server, pcd=setting)
        assert said.startswith("Field 'pcd': ") and word in said and "llama_pcd" not in said


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + closing * depth


DEEP = [  # where a client's brackets reach a recursion: they are counted in the body, before its route and fields are read
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "documents": %s}'),
    ("/documents", '{"file_data": %s}'),
    ("/completion", "%s"),
    ("/completion", '{"prompt": "a", "n_predict": 1, "x": %s}'),
]


@pytest.mark.parametrize(("path", "body"), DEEP)
def test_brackets_in_brackets_are_refused_before_anything_follows_them(server: Server, path: str, body: str) -> None:
    """200 KB of them ended the process, whatever field they were in."""
    for brackets in (nested(100_000), nested(100_000, '{"a":', "}").replace("}", "1}", 1)):
        status, answer = ask(server, path, (body % brackets).encode())
        assert status == 400 and "more than 500 deep; allowed: at most that" in answer["error"]["message"]
    assert ask(server, "/health")[0] == 200


def test_so_are_those_in_a_text_that_is_compiled(server: Server) -> None:
    round_ones = nested(50_000, "(", ")")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": nested(50_000)}}
    bodies = {
        "grammar": {"grammar": f'root ::= {"(" * 50_000} "a" {")" * 50_000}'},
        "pattern": {"response_format": {"type": "json_schema", "schema": {"type": "string", "pattern": round_ones}}},
        "arguments": {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}, *MESSAGES]},
    }
    for field, body in bodies.items():
        status, answer = ask(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **body})
        assert status == 400 and f"field '{field}' has brackets in brackets" in answer["error"]["message"]
    assert ask(server, "/health")[0] == 200


def test_500_levels_are_let_through_and_501_are_not(server: Server) -> None:
    for depth, expected in ((499, 200), (500, 400)):  # beside the body's own
        assert ask(server, "/tokenize", f'{{"content": "a", "x": {nested(depth)}}}'.encode())[0] == expected
    # in texts, behind backslashes and quotes, they are no nesting, however many there are
    body = {"content": "(" * 600 + '"[' * 600 + '\\"{' * 600, "x": ['\\"', {'"\\': ['[{("\\]' * 600]}]}
    assert ask(server, "/tokenize", body)[0] == 200


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread's stack is as large as the system says")
def test_a_long_word_ends_no_server(tiny: Tiny) -> None:
    """llama.cpp splits a text by std::regex, which calls itself for each letter; two of a letter are a token of this vocabulary."""
    with ready(model=tiny("llama", pre="tekken"), parallel=1) as words:
        tokens = ask(words, "/tokenize", {"content": "a" * 200_000})[1]["tokens"]
        assert len(tokens) == 100_000 and len(set(tokens)) == 1
        body = {"messages": MESSAGES, "documents": [{"name": "a", "text": "!" * 70_000}]}
        assert ask(words, "/v1/chat/completions", body)[0] == 400, "it does not fit"
        assert ask(words, "/health")[0] == 200


def test_a_wrong_suffix_names_the_field_model_and_a_refused_stream_is_a_plain_400(server: Server) -> None:
    said = refused(server, model="demo:pcd-x")
    assert said.startswith('Field \'model\': it is "demo:pcd-x"; allowed: "demo", "demo:pcd", "demo:pcd-off", ')
    for name in ("demo:unsure", "demo:7b", "demo:", "demo:x:pcd"):
        assert f'it is "{name}"; allowed: "demo", "demo:pcd"' in refused(server, model=name)
    assert 'it is "gpt-4:pcd-x"; allowed: "gpt-4", "gpt-4:pcd"' in refused(server, model="gpt-4:pcd-x")
    for setting in ({"beta": -1}, "x"):
        assert "Field 'pcd'" in refused(server, pcd=setting, stream=True)


# -- what the server says ---------------------------------------------------------------------------------------------


def test_a_server_that_only_restricts_the_view_over_rotates_on_request() -> None:
    with ready(pcd="unsure", parallel=2) as server:
        assert meant(server)["perturbation"] == "none"
        assert meant(server, n_predict=2, pcd="paper")["perturbation"] == "over-rotation"


def test_a_server_without_a_setting_runs_what_needs_no_rotation_on_request(tiny: Tiny) -> None:
    with ready(model=tiny("starcoder"), parallel=2) as server:
        assert server.refusals() == {} and meant(server) is False
        for asked in ("window", True):
            assert meant(server, n_predict=2, pcd=asked)["window"] == 64
        for told in ("paper", {"beta": 1.5}):
            assert "Field 'pcd': " in refused(server, pcd=told), told


def test_props_name_every_field_and_models_are_listed_with_their_settings(server: Server, off: Server) -> None:
    on, without = (ask(at, "/props")[1]["pcd"] for at in (server, off))
    listed = ask(server, "/v1/models")[1]["data"]
    assert [one["id"] for one in listed] == ["demo", "demo:pcd", *(f"demo:pcd-{name}" for name in ("off", *PRESETS))]
    assert listed[0]["pcd"] == on and all(one["meta"] == listed[0]["meta"] for one in listed)
    assert on["default"] is True and without["default"] is False
    assert on["setting"] == {**PCDConfig().as_dict(), "evaluation": "fused", "sequences": "chosen"}
    assert set(on["per_request"]) < set(PCDConfig().as_dict())
    assert not any(complete(off, "a", n_predict=2, grammar=RULES)["timings"][f"pcd_{name}"] for name in COUNTS)


def test_slots_and_metrics_say_what_pcd_did(server: Server) -> None:
    floors = {"min_context": 20, "min_entropy": 1.0}
    for slot, asked, kinds in ((3, {"pcd": floors}, ("twins", "skipped")), (2, {"grammar": RULES}, ("constrained",))):
        before = [counter(server, f"pcd_{name}_total") for name in COUNTS]
        timings = complete(server, PROMPTS[2], id_slot=slot, **asked)["timings"]
        assert all(timings[f"pcd_{kind}"] > 0 for kind in kinds)
        counted = [counter(server, f"pcd_{name}_total") - b for name, b in zip(COUNTS, before)]
        assert counted == [timings[f"pcd_{name}"] for name in COUNTS]
    slots = {one["id"]: one["params"] for one in ask(server, "/slots")[1] if "params" in one}
    assert slots[3]["pcd"]["min_entropy"] == 1.0 and slots[2]["pcd"] is False


def test_candidates_come_with_both_rows(server: Server, llm: pypcd.Llama) -> None:
    answer = complete(server, PROMPTS[0], pcd={"gamma": 3}, n_predict=3, n_probs=6)
    llm.pcd = serving.in_python({"gamma": 3})
    text = llm.tokenize(PROMPTS[0].encode())
    limit = contrasted(rounding_of(llm, text), 2.5)
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(text)
    for entry in answer["completion_probabilities"]:
        rows = llm.pcd_logits()
        for candidate in [entry, *entry["top_logprobs"], *entry["pcd"]["pushed_out"]]:
            got = candidate.get("pcd", candidate)
            wanted = {name: serving.log_softmax(getattr(rows, name)) for name in ("standard", "local", "contrasted")}
            for name, row in wanted.items():
                expected = float(row[candidate["id"]])
                assert (got[name] is None) == (not np.isfinite(expected)), (name, candidate)
                assert got[name] is None or abs(got[name] - expected) < limit, (name, candidate)
        seen = {candidate["id"] for candidate in [*entry["top_logprobs"], *entry["pcd"]["pushed_out"]]}
        assert set(np.argsort(rows.standard)[::-1][:6].tolist()) <= seen
        assert entry["pcd"]["strength"] == pytest.approx(2.5)
        llm.eval([entry["id"]])
    drawn = complete(server, PROMPTS[0], pcd={"gamma": 2}, n_probs=3, post_sampling_probs=True, temperature=1)
    tops = [top for entry in drawn["completion_probabilities"] for top in entry["top_probs"]]
    assert tops and all(top["pcd"]["contrasted"] is not None for top in tops)
    plain = complete(server, PROMPTS[0], pcd=False, n_predict=1, n_probs=2)["completion_probabilities"][0]
    assert "pcd" not in plain


def test_logprobs_of_a_chat_carry_both_rows(server: Server) -> None:
    told = complete(server, PROMPTS[0], pcd="cautious", n_probs=3)["completion_probabilities"]
    body = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": N, "temperature": 0, "pcd": "cautious"}
    whole, stream = (
        ask(server, "/v1/chat/completions", {**body, "logprobs": True, "top_logprobs": 3, "stream": stream})[1]
        for stream in (False, True)
    )
    choices = [choice for part in serving.events(stream) for choice in part["choices"] if choice.get("logprobs")]
    streamed = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    for entries in (whole["choices"][0]["logprobs"]["content"], streamed):
        assert [entry["pcd"] for entry in entries] == [entry["pcd"] for entry in told]
