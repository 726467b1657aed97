"""llama-server's own features beside PCD: each works with it, and gives what the same requests give one after the other."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import BASE, PROMPTS, SMALL, ask, complete, is_greedy, llm, ready

import pypcd
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server

STRONG = {"beta": 30.0}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def server(saves: Path) -> Iterator[Server]:
    options = [*SMALL, "--slot-save-path", f"{saves}/", "--context-shift"]
    options[options.index("8192")] = "2304"  # 768 each
    with ready(pcd=BASE, parallel=3, options=options) as made:
        yield made


def running(*options: str, pcd: Any = BASE, parallel: int = 2) -> contextlib.AbstractContextManager[Server]:
    return ready(pcd=pcd, parallel=parallel, options=[*SMALL, *options])


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_a_grammar_and_a_schema_hold(server: Server) -> None:
    assert set(complete(server, PROMPTS[0], pcd=STRONG, grammar='root ::= "x" [0-9]+')["content"][1:]) <= set(
        "0123456789"
    )
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    text = complete(server, PROMPTS[0], pcd=STRONG, json_schema=schema, n_predict=40)["content"]
    assert list(json.loads(text)) == ["a"]


def test_a_logit_bias_reaches_what_the_contrast_took_out(server: Server) -> None:
    out = complete(server, PROMPTS[0], pcd={"gamma": 2}, n_predict=1, n_probs=6)["completion_probabilities"][0]
    token = next(entry["id"] for entry in out["top_logprobs"] if entry["pcd"]["contrasted"] is None)
    answer = complete(server, PROMPTS[0], pcd={"gamma": 2}, n_predict=3, logit_bias=[[token, 100.0]])
    assert answer["tokens"] == [token] * 3
    never = complete(server, PROMPTS[0], pcd={"gamma": 2}, n_predict=3, logit_bias=[[out["id"], False]])
    assert out["id"] not in never["tokens"]


def test_a_seed_repeats_an_answer_and_a_stop_ends_it(server: Server) -> None:
    drawn = {"temperature": 1.5, "pcd": {"relative_top": 0.01}, "cache_prompt": False}
    same = [complete(server, PROMPTS[1], seed=5, id_slot=0, **drawn)["content"] for _ in range(2)]
    others = {complete(server, PROMPTS[1], seed=seed, id_slot=0, **drawn)["content"] for seed in range(6)}
    assert same[0] == same[1] and len(others) > 1
    text = complete(server, PROMPTS[0], pcd=STRONG)["content"]
    answer = complete(server, PROMPTS[0], pcd=STRONG, stop=[text[3:6]])
    assert answer["content"] == text[: text.index(text[3:6])] and answer["stop_type"] == "word"


def test_probabilities_after_sampling(server: Server) -> None:
    answer = complete(server, PROMPTS[0], pcd={"gamma": 2}, n_probs=3, post_sampling_probs=True, temperature=1)
    for entry in answer["completion_probabilities"]:
        assert 1 <= len(entry["top_probs"]) <= 3
        assert all(top["pcd"]["contrasted"] is not None for top in entry["top_probs"])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_saved_slot_goes_on(server: Server, llm: pypcd.Llama) -> None:
    text = " ".join(PROMPTS)
    for setting in (STRONG, False):
        first = complete(server, text, pcd=setting, id_slot=0, n_predict=8)
        assert ask(server, "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
        complete(server, "another text", pcd=setting, id_slot=0)
        assert ask(server, "/slots/0?action=restore", {"filename": "a.bin"})[0] == 200
        again = complete(server, text, pcd=setting, id_slot=0, n_predict=8)
        assert again["tokens"] == first["tokens"] and again["timings"]["cache_n"] > 0
        is_greedy(llm, text, setting, again["tokens"])


def test_a_context_that_shifts_goes_on(server: Server) -> None:
    long = " ".join(f"{i} is {i * i}." for i in range(90))
    answer = complete(server, long, pcd={"beta": 1.0}, n_predict=400, ignore_eos=True, cache_prompt=False)
    assert answer["tokens_predicted"] == 400 and answer["timings"]["pcd_twins"] > 0
    assert answer["tokens_evaluated"] + 400 > 768, "nothing was shifted"


def test_a_second_stream_follows_saved_slots_and_the_prompt_cache(saves: Path, llm: pypcd.Llama) -> None:
    setting = "paper:cache=separate:evaluation=fused"
    with running("--slot-save-path", f"{saves}/", pcd=setting) as server:
        text = " ".join(PROMPTS)
        first = complete(server, text, id_slot=0, n_predict=8)
        assert ask(server, "/slots/0?action=save", {"filename": "b.bin"})[0] == 200
        complete(server, "another text", id_slot=0, pcd=False)
        assert ask(server, "/slots/0?action=restore", {"filename": "b.bin"})[0] == 200
        again = complete(server, text, id_slot=0, n_predict=8)
        assert again["tokens"] == first["tokens"]
        is_greedy(llm, text, pypcd.PCDConfig.resolve(setting), again["tokens"])
        assert "window is 4" in ask(server, "/completion", {"prompt": "a", "pcd": {"window": 4}})[1]["error"]["message"]


# -- speculation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "3"],
        ["--model-draft", str(DEMO_MODEL), "--spec-type", "draft-simple"],
    ],
    ids=["n-gram", "draft"],
)
def test_speculation_changes_no_answer(options: list[str], llm: pypcd.Llama) -> None:
    with running(*options) as server:
        drafted = 0
        for setting in (False, STRONG, "cautious"):
            answer = complete(server, PROMPTS[0] * 3, pcd=setting, n_predict=48, ignore_eos=True)
            is_greedy(llm, PROMPTS[0] * 3, setting, answer["tokens"], ends=False)
            drafted += answer["timings"].get("draft_n", 0)
        assert drafted > 0, "nothing was drafted"


# -- together ---------------------------------------------------------------------------------------------------------


def test_the_first_request_with_pcd_leaves_a_running_one_alone(llm: pypcd.Llama) -> None:
    with running(pcd=False, parallel=3) as server, concurrent.futures.ThreadPoolExecutor(3) as pool:
        plain = [pool.submit(complete, server, prompt, n_predict=300, ignore_eos=True) for prompt in PROMPTS[:2]]
        time.sleep(0.05)
        is_greedy(llm, PROMPTS[2], STRONG, complete(server, PROMPTS[2], pcd=STRONG)["tokens"])
        for prompt, answer in zip(PROMPTS, plain):
            assert "pcd_twins" not in answer.result()["timings"]
            is_greedy(llm, prompt, False, answer.result()["tokens"], ends=False)


def test_a_server_of_embeddings_refuses_pcd_alone() -> None:
    with running("--embeddings", "--pooling", "mean", pcd=False) as server:
        alone = ask(server, "/embedding", {"content": PROMPTS[0]})[1]
        status, answer = ask(server, "/completion", {"prompt": PROMPTS[0], "n_predict": 4, "pcd": True})
        assert status == 400 and "this context pools embeddings and computes no logits" in answer["error"]["message"]
        assert ask(server, "/embedding", {"content": PROMPTS[0]})[1] == alone


def test_it_sleeps_and_wakes_with_its_settings(llm: pypcd.Llama) -> None:
    with running("--sleep-idle-seconds", "1") as server:
        first = complete(server, PROMPTS[0], pcd=STRONG)["tokens"]
        for _ in range(100):
            if ask(server, "/props")[1]["is_sleeping"]:
                break
            time.sleep(0.1)
        else:
            pytest.fail("it does not sleep")
        assert complete(server, PROMPTS[0], pcd=STRONG)["tokens"] == first


def test_a_full_context_ends_its_own_answer_alone(llm: pypcd.Llama) -> None:
    options = ["--ctx-size", "1024", "--cache-ram", "0"]
    with running(*options, parallel=4) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [(PROMPTS[i % 3] + str(i), setting) for i, setting in enumerate([False, True, STRONG, "cautious"])]
        ask_all = [
            pool.submit(complete, server, prompt, pcd=setting, n_predict=-1, ignore_eos=True)
            for prompt, setting in jobs
        ]
        for (prompt, setting), answer in zip(jobs, ask_all):
            told = answer.result()
            assert told["stop_type"] == "limit" and told["tokens_evaluated"] + told["tokens_predicted"] >= 256
            is_greedy(llm, prompt, setting, told["tokens"], ends=False)
        status, answer = ask(server, "/completion", {"prompt": "a " * 600, "n_predict": 1})
        assert status == 400 and answer["error"]["type"] == "exceed_context_size_error"
