"""llama-server's own features beside PCD: each works with it, and gives what the same requests give one after the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from processes import within
from serving import BASE, PROMPTS, SMALL, ask, complete, is_greedy, ready, with_workers

import pypcd
from pypcd.server import Server

pytest_plugins = ["serving"]  # fixtures

STRONG = {"beta": 30.0}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


def running(*options: str, pcd: Any = BASE, parallel: int = 2) -> contextlib.AbstractContextManager[Server]:
    return ready(pcd=pcd, parallel=parallel, options=[*SMALL, *options])


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_saved_slot_goes_on_and_so_does_the_prompt_cache(saves: Path, llm: pypcd.Llama) -> None:
    text, pcd = " ".join(PROMPTS), "paper:evaluation=fused"  # which has second keys
    with running("--slot-save-path", f"{saves}/", pcd=pcd) as server:
        for asked in ({}, {"pcd": False}):
            first = complete(server, text, id_slot=0, n_predict=8, **asked)
            assert ask(server, "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
            complete(server, "another text", id_slot=0, pcd=False)
            assert ask(server, "/slots/0?action=restore", {"filename": "a.bin"})[0] == 200
            again = complete(server, text, id_slot=0, n_predict=8, **asked)
            assert again["tokens"] == first["tokens"] and again["timings"]["cache_n"] > 0
            is_greedy(llm, text, asked.get("pcd", pypcd.PCDConfig.resolve(pcd)), again["tokens"])


# -- speculation ------------------------------------------------------------------------------------------------------


def test_speculation_changes_no_answer(llm: pypcd.Llama) -> None:
    """By a second model: see test_serve_begin.py."""
    sizes = "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "3"
    with running("--spec-type", "ngram-simple", *sizes) as server:
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
            assert answer.result()["timings"]["pcd_twins"] == 0
            is_greedy(llm, prompt, False, answer.result()["tokens"], ends=False)


def test_it_sleeps_and_wakes_with_its_settings(llm: pypcd.Llama) -> None:
    with running("--sleep-idle-seconds", "1") as server:
        first = complete(server, PROMPTS[0], pcd=STRONG)["tokens"]
        assert within(lambda: ask(server, "/props")[1]["is_sleeping"])
        assert complete(server, PROMPTS[0], pcd=STRONG)["tokens"] == first


@pytest.mark.skipif(os.name == "nt", reason="a shell script")
def test_it_stays_awake_while_a_document_is_read(tmp_path: Path) -> None:
    """What reads it asks the model for tokens, and a server that sleeps has none."""
    code = """if True:
        import time
        from pypcd.server import worker
        own = worker._answer
        worker._answer = lambda request, model: time.sleep(3) or own(request, model)
        worker.main()"""
    with with_workers(code, tmp_path, parallel=1, options=[*SMALL, "--sleep-idle-seconds", "1"]) as server:
        for _ in range(2):  # it has slept before the second one
            status, answer = ask(server, "/documents", {"filename": "a", "text": "b"})
            assert status == 200 and answer["n_tokens"] > 0, answer
            assert within(lambda: ask(server, "/props")[1]["is_sleeping"])


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
