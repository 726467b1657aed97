"""llama-server's own features beside PCD: each works with it, and gives what the same requests give one after the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import native_row
from processes import within
from reference import bits
from serving import BASE, PROMPTS, answered, ask, complete, is_greedy, ready, with_workers

import pypcd
from pypcd.gguf import DEMO_MODEL
from pypcd.server import Server

STRONG = {"beta": 30.0}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


def running(*options: str, **given: Any) -> contextlib.AbstractContextManager[Server]:
    return ready(*options, **{"pcd": BASE, "parallel": 2, **given})


def test_a_saved_slot_goes_on_and_so_does_the_prompt_cache(saves: Path, llm: pypcd.Llama) -> None:
    text = " ".join(PROMPTS)
    with running("--slot-save-path", f"{saves}/") as server:  # BASE has second keys
        for asked in ({}, {"pcd": False}):
            first = complete(server, text, id_slot=0, n_predict=8, **asked)
            assert ask(server, "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
            complete(server, "another text", id_slot=0, pcd=False)
            assert ask(server, "/slots/0?action=restore", {"filename": "a.bin"})[0] == 200
            again = complete(server, text, id_slot=0, n_predict=8, **asked)
            assert again["tokens"] == first["tokens"] and again["timings"]["cache_n"] > 0
            is_greedy(llm, text, asked.get("pcd", {}), again["tokens"])


def test_speculation_changes_no_answer(llm: pypcd.Llama) -> None:
    """By a second model: below."""
    sizes = "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "3"
    with running("--spec-type", "ngram-simple", *sizes) as server:
        drafted = 0
        for setting in (False, STRONG, "cautious"):
            answer = complete(server, PROMPTS[0] * 3, pcd=setting, n_predict=48, ignore_eos=True)
            is_greedy(llm, PROMPTS[0] * 3, setting, answer["tokens"], ends=False)
            drafted += answer["timings"].get("draft_n", 0)
        assert drafted > 0, "nothing was drafted"


def test_the_first_request_with_pcd_leaves_a_running_one_alone(llm: pypcd.Llama) -> None:
    with running(pcd=False, parallel=3) as server, concurrent.futures.ThreadPoolExecutor(3) as pool:
        plain = [pool.submit(complete, server, prompt, n_predict=300, ignore_eos=True) for prompt in PROMPTS[:2]]
        time.sleep(0.05)
        is_greedy(llm, PROMPTS[2], STRONG, complete(server, PROMPTS[2], pcd=STRONG)["tokens"])
        for prompt, answer in zip(PROMPTS, plain):
            assert answer.result()["timings"]["pcd_twins"] == 0
            is_greedy(llm, prompt, False, answer.result()["tokens"], ends=False)


def test_it_sleeps_and_wakes_with_its_settings_and_not_while_a_document_is_read(tmp_path: Path) -> None:
    """What reads a document asks the model for tokens, and a server that sleeps has none."""
    slow = "worker._answer = lambda request, model: time.sleep(3) or own(request, model)"
    code = f"import time\n\nown = worker._answer\n{slow}"
    said = []
    with with_workers(code, tmp_path, "--sleep-idle-seconds", "1", pcd=BASE) as server:
        for _ in range(2):  # it has slept before the second one
            assert answered(server, "/documents", {"filename": "a", "text": "b"})["n_tokens"] > 0
            said.append(complete(server, PROMPTS[0], pcd=STRONG)["tokens"])
            assert within(lambda: ask(server, "/props")[1]["is_sleeping"])
    assert said[0] == said[1]


def test_a_full_context_ends_its_own_answer_alone(llm: pypcd.Llama) -> None:
    small = running("--ctx-size", "1024", "--cache-ram", "0", parallel=4)
    with small as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [(PROMPTS[i % 3] + str(i), setting) for i, setting in enumerate([False, True, STRONG, "cautious"])]
        answers = pool.map(lambda job: complete(server, job[0], pcd=job[1], n_predict=-1, ignore_eos=True), jobs)
        for (prompt, setting), told in zip(jobs, answers):
            assert told["stop_type"] == "limit" and told["tokens_evaluated"] + told["tokens_predicted"] >= 256
            is_greedy(llm, prompt, setting, told["tokens"], ends=False)
        status, answer = ask(server, "/completion", {"prompt": "a " * 600, "n_predict": 1})
        assert status == 400 and answer["error"]["type"] == "exceed_context_size_error"


# -- where an answer begins: where its prompt ends, whatever the slot holds of an earlier answer --------------------------
#
# min_first_entropy decides by an answer's first token. So each answer is compared with that of the same request without the cache, and
# each decision with the entropy that pypcd.Llama, with PCD off, finds behind the same tokens.

VIEW = {"perturbation": "none", "window": 4, "n_sink": 0, "beta": 4.0, "gamma": 384, "relative_top": 0.0}
N_PAIRS = 60
NEAR = 0.05  # bits: a floor is not nearer to an entropy, so that rounding decides nothing


@pytest.fixture(scope="module")
def server(saves: Path) -> Iterator[Server]:
    with running("--slot-save-path", f"{saves}/", parallel=4) as made:
        yield made


def entropy_behind(llm: pypcd.Llama, tokens: list[int]) -> float:
    llm.pcd = False
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.eval(tokens)
    return bits(native_row(llm))


def answer(server: Server, tokens: list[int], floor: float, n: int = 6, **fields: Any) -> dict[str, Any]:
    setting = {**VIEW, "min_first_entropy": floor}
    return complete(server, tokens, pcd=setting, n_predict=n, ignore_eos=True, **fields)  # type: ignore[arg-type]


def told(found: dict[str, Any]) -> tuple[list[int], list[int]]:
    return found["tokens"], [found["timings"][f"pcd_{name}"] for name in ("twins", "skipped", "contrasted")]


def pairs(llm: pypcd.Llama, server: Server, n: int, seed: int) -> Iterator[tuple[list[int], list[int], float, bool]]:
    """A prompt, the same with the first tokens of its answer, a floor, and whether the answer to the second one is contrasted."""
    rng = random.Random(seed)
    text = llm.tokenize((" ".join(PROMPTS) * 3).encode(), add_bos=False)
    for _ in range(n):
        start, size = rng.randrange(len(text) - 30), rng.randrange(1, 30)
        prompt = [llm.token_bos(), *text[start : start + size]]
        before = entropy_behind(llm, prompt)
        # the decision about the first answer is made, and so are its tokens
        floor = max(before + rng.choice([-1, 1]) * rng.uniform(NEAR, 1.0), NEAR)
        first = answer(server, prompt, floor, rng.randrange(1, 9), id_slot=0)["tokens"]
        goes_on = [*prompt, *first[: rng.randrange(1, len(first) + 1)]]
        after = entropy_behind(llm, goes_on)
        if abs(after - floor) < NEAR:
            continue
        yield prompt, goes_on, floor, after >= floor


def test_the_cache_changes_no_answer(server: Server, llm: pypcd.Llama) -> None:
    n_other = 0  # of those whose decision is not that of the answer in the slot
    for prompt, goes_on, floor, is_contrasted in pairs(llm, server, N_PAIRS, 1):
        cached = answer(server, goes_on, floor, id_slot=0)
        alone = answer(server, goes_on, floor, id_slot=1, cache_prompt=False)
        assert cached["timings"]["cache_n"] == len(goes_on) - 1 and alone["timings"]["cache_n"] == 0
        assert told(cached) == told(alone), (prompt, goes_on, floor)
        assert (alone["timings"]["pcd_contrasted"] > 0) == is_contrasted, (goes_on, floor)
        # by this the page knows, when it goes on from a token
        assert is_contrasted or alone["timings"]["pcd_twins"] <= 1
        n_other += (entropy_behind(llm, prompt) >= floor) != is_contrasted
    assert n_other >= N_PAIRS // 8, "or this shows nothing"


def test_each_of_several_answers_begins_there(server: Server, llm: pypcd.Llama) -> None:
    contrasted = set()
    for _, goes_on, floor, is_contrasted in pairs(llm, server, 8, 2):
        body = {"prompt": goes_on, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "n": 3, "id_slot": 0}
        several = answered(server, "/v1/completions", {**body, "pcd": {**VIEW, "min_first_entropy": floor}})
        alone = answer(server, goes_on, floor, id_slot=1, cache_prompt=False)
        assert [choice["text"] for choice in several["choices"]] == [alone["content"]] * 3
        contrasted.add(is_contrasted)
    assert contrasted == {False, True}


def test_a_slot_that_was_saved_or_shifted_holds_no_decision(saves: Path, llm: pypcd.Llama) -> None:
    given = ["--slot-save-path", f"{saves}/", "--context-shift", "--ctx-size", "1024"]  # 512 each
    with running(*given) as server:
        for _, goes_on, floor, is_contrasted in pairs(llm, server, 4, 3):
            assert ask(server, "/slots/0?action=save", {"filename": "a.bin"})[0] == 200
            alone = told(answer(server, goes_on, floor, id_slot=1, cache_prompt=False))
            assert ask(server, "/slots/0?action=restore", {"filename": "a.bin"})[0] == 200
            restored = answer(server, goes_on, floor, id_slot=0)
            assert restored["timings"]["cache_n"] > 0 and told(restored) == alone
            shifted = answer(server, goes_on, floor, 600, id_slot=0)  # one decision, however far it goes
            assert (shifted["timings"]["pcd_contrasted"] == 600) == is_contrasted
            assert told(answer(server, goes_on, floor, id_slot=0)) == alone


def test_drafted_tokens_begin_no_answer(server: Server, llm: pypcd.Llama) -> None:
    drafts = ["--model-draft", str(DEMO_MODEL), "--spec-type", "draft-simple"]
    n_drafted = 0
    with running(*drafts) as drafting:
        for _, goes_on, floor, _ in pairs(llm, drafting, 8, 4):
            found = answer(drafting, goes_on, floor, 24, id_slot=0)
            assert found["tokens"] == answer(server, goes_on, floor, 24, id_slot=1, cache_prompt=False)["tokens"]
            n_drafted += found["timings"].get("draft_n", 0)
    assert n_drafted > 0, "nothing was drafted"
