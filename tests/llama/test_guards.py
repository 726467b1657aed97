"""Closed models, threads, streams and processes: PCDError where stock llama_cpp crashes, hangs or mixes texts. What could end the
process runs in one of its own."""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import operator
import os
import threading
from collections.abc import Callable
from typing import Any

import llama_cpp
import pytest
from conftest import SMALL, TOKENS, Load, Tiny
from own_process import run

import pypcd

CLOSED = "the model is closed"
# --- after close() ---

CHAT = [{"role": "user", "content": "x"}]
# each public method and property that needs the model
BARE = ["check_pcd", "n_ctx", "n_embd", "n_vocab", "pcd_logits", "pcd_stats", "pooling_type", "sample", "save_state"]
BARE += ["token_bos", "token_eos", "token_nl", "__enter__"]
USES: dict[str, str] = {
    **{name: f"llm.{name}()" for name in BARE},
    **{name: f"llm.{name}" for name in ("ctx", "model")},
    "__call__": "llm('abc', max_tokens=2)",
    "create_completion": "llm.create_completion('abc', max_tokens=2)",
    "create_chat_completion": f"llm.create_chat_completion({CHAT}, max_tokens=2)",
    "create_chat_completion_openai_v1": f"llm.create_chat_completion_openai_v1({CHAT}, max_tokens=2)",
    "create_embedding": "llm.create_embedding('x')",
    "detokenize": "llm.detokenize([5, 6])",
    "embed": "llm.embed('x')",
    "eval": "llm.eval([1, 2])",
    "generate": "next(llm.generate([1, 2]))",
    "load_sequence": "llm.load_sequence('kept.state', [1])",
    "load_state": "llm.load_state(state)",
    "pcd": "setattr(llm, 'pcd', True)",
    "ask": "llm.ask(text='abc', question='b?')",
    "tokenize": "llm.tokenize(b'abc')",
    "tokenizer": "llm.tokenizer().encode('abc')",
}
ENGINE = (
    "decode(llm, [(1, 0, 0, True)]); row(llm); rewind(llm, 0); copy_sequence(llm, 0, 1); "
    "set_abort(llm, lambda: True); is_end(llm, 1); token_bytes(llm, 1); n_layer(llm); check_decoder(llm); "
    "pcd(llm).set(None); pcd(llm).logits(0); pcd(llm).init_sampler(-1)"
)
LOW = {
    "llama_decode": "llama_cpp.llama_decode(llm.ctx, llama_cpp.llama_batch_init(1, 0, 1))",
    "llama_get_memory": "llama_cpp.llama_get_memory(llm.ctx)",
    "an old tokenizer": "tokenizer.encode('abc')",
    "an old tokenizer's text": "tokenizer.decode([5, 6])",
    "eval of nothing": "llm.eval([])",
    **{f"engine.{use}": f"engine.{use}" for use in ENGINE.split("; ")},
    "a stream": "next(stream)",
}
PLAIN = {  # what only Python data is needed for
    "close", "context_params", "engine", "eval_logits", "eval_tokens", "from_pretrained", "last_answer", "logits_to_logprobs", "longest_token_prefix",
    "metadata",
    "model_params", "n_seq_max", "reset", "set_cache", "set_seed",
}  # fmt: skip


def test_every_public_name_is_tried() -> None:
    public = {name for name in dir(pypcd.Llama) if not name.startswith("_") and hasattr(pypcd.Llama, name)}
    assert public == {name for name in {*USES, *PLAIN} if not name.startswith("__")}


def test_a_closed_model_says_so_whatever_is_asked(tiny: Tiny) -> None:
    tries = {**USES, **LOW}
    lines = run(
        tiny("llama"),
        "from pypcd import engine\nllm = new(); llm.eval([5, 6, 7]); state = llm.save_state(); tokenizer = llm.tokenizer()\n"
        "stream = llm.generate([1, 2, 3], temp=0); next(stream)\n"
        "llm.close(); llm.close()\n" + "\n".join(f"said(lambda: {use})" for use in tries.values()) + "\n"
        "llm.reset(); llm.set_seed(3); llm.set_cache(None); engine.set_abort(llm, None); print(list(llm.eval_tokens), llm.n_seq_max, llm.pcd)\n"
        "import pickle; again = pickle.loads(pickle.dumps(llm)); print(again.n_ctx()); again.close(); del llm, again; gc.collect()",
    )
    for name, line in zip(tries, lines):
        if "openai" not in name:  # which may not be installed
            assert line.startswith(f"PCDError: {CLOSED}, by close()"), (name, line)
    assert lines[len(tries) :] == ["[] 1 None", "256"]


def test_a_with_block_closes(tiny: Tiny) -> None:
    with pytest.raises(KeyError, match="mine"), pypcd.Llama(tiny("llama"), **SMALL) as llm:
        assert llm("abc", max_tokens=2)["usage"]["completion_tokens"] == 2
        with llm:
            pass
        with pytest.raises(pypcd.PCDError, match=CLOSED):
            llm.n_ctx()
        raise KeyError("mine")


def test_a_model_is_freed_with_its_last_reference(tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        """
import weakref
gc.disable()
llm = new(); ref = weakref.ref(llm); llm("abc", max_tokens=3); text = llm.generate([1, 2]); next(text); text.close()
del llm, text; print(ref())""",
    )
    assert lines == ["None"]


# --- threads ---


def test_models_that_are_opened_at_once_leave_the_output_of_the_process(tiny: Tiny) -> None:
    """llama_cpp sends it elsewhere meanwhile."""
    lines = run(
        tiny("llama"),
        """
opening = [threading.Thread(target=lambda: [new() for _ in range(3)]) for _ in range(4)]
for thread in opening: thread.start()
for thread in opening: thread.join()
print("heard")""",
    )
    assert lines == ["heard"]


def test_while_one_thread_is_at_it_another_may_tokenize_and_nothing_else(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper")
    alone = list(itertools.islice(llm.generate(TOKENS[:20], temp=0), 5))
    state, waiting = llm.save_state(), llm.generate([1, 2], temp=0)
    here, go_on, texts = threading.Event(), threading.Event(), []

    def hold(tokens: Any, scores: Any) -> bool:
        """Within a step, and in no other method of the model's."""
        here.set()
        assert go_on.wait(60)
        return False

    def work() -> None:
        text = llm.generate(TOKENS[:20], temp=0, stopping_criteria=llama_cpp.StoppingCriteriaList([hold]))
        texts.append(list(itertools.islice(text, 5)))

    worker = threading.Thread(target=work, name="worker")
    worker.start()
    assert here.wait(60)
    assert llm.detokenize(llm.tokenize(b"abc")) == b"abc"
    assert (llm.n_ctx(), llm.n_vocab(), llm.token_bos()) == (256, 384, 1)
    for use in (
        lambda: llm("x"),
        lambda: next(waiting),
        lambda: llm.eval([1]),
        lambda: llm.sample(),
        lambda: llm.load_state(state),
        lambda: llm.pcd_logits(),
        lambda: setattr(llm, "pcd", False),
        lambda: llm.close(),
    ):
        with pytest.raises(pypcd.PCDError, match="'MainThread' calls a model that thread 'worker' is using"):
            use()
    go_on.set()
    worker.join()
    assert texts == [alone] == [list(itertools.islice(llm.generate(TOKENS[:20], temp=0), 5))]


def test_threads_that_take_turns_are_right(tiny: Tiny, load: Load) -> None:
    """As llama_cpp.server and web frameworks read a stream: each step in whatever thread of a pool."""
    llm = load(tiny("llama"), "paper")
    alone = list(itertools.islice(llm.generate(TOKENS[:20], temp=0), 12))
    for pcd in (None, {"beta": 2.5}):
        got: list[int] = []

        def read(stream: Any = llm.generate(TOKENS[:20], temp=0, pcd=pcd), got: list[int] = got) -> None:  # noqa: B008
            got.append(next(stream))

        for _ in range(12):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        assert got == alone


def test_a_text_that_was_overtaken_says_so_and_spoils_nothing(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), "paper")
    alone = list(itertools.islice(llm.generate(TOKENS[:20], temp=0), 6))
    state = llm.save_state()
    for between in (
        lambda: llm("abc", max_tokens=2),
        lambda: llm.eval([5]),
        lambda: llm.reset(),
        lambda: llm.load_state(state),
        lambda: next(llm.generate([7, 8])),
    ):
        first = llm.generate(TOKENS[:20], temp=0)
        assert [next(first), next(first)] == alone[:2]
        llm.save_state()  # looking does no harm
        assert next(first) == alone[2]
        between()
        with pytest.raises(pypcd.PCDError, match="this text cannot go on.*'MainThread'.*read a stream to its end"):
            next(first)
        assert list(itertools.islice(llm.generate(TOKENS[:20], temp=0), 6)) == alone


def test_a_callback_that_asks_its_own_model_for_a_text_is_an_error(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), False)
    alone = llm("abc", max_tokens=9, temperature=0)["choices"][0]["text"]

    def ask(use: Callable[[], Any]) -> str:
        def processor(tokens: Any, scores: Any) -> Any:
            use()
            return scores

        kwargs = {"logits_processor": llama_cpp.LogitsProcessorList([processor])}
        return llm("abc", max_tokens=9, temperature=0, **kwargs)["choices"][0]["text"]

    assert ask(lambda: llm.detokenize(llm.tokenize(b"other text"))) == alone
    with pytest.raises(pypcd.PCDError, match="asks the model that has called it for a text; open a second"):
        ask(lambda: llm("other", max_tokens=2))
    assert llm("abc", max_tokens=9, temperature=0)["choices"][0]["text"] == alone


# --- processes ---

# Python 3.12 says at each fork what these tests are about
NO_FORK_WARNING = (
    'import warnings; warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)'
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_says_so_and_the_parent_goes_on(tiny: Tiny) -> None:
    lines = run(
        tiny("llama"),
        f"""
{NO_FORK_WARNING}
llm = new(n_threads=2, n_threads_batch=2); alone = llm("abc" * 20, max_tokens=9, temperature=0)["choices"]
stream = llm.generate([1, 2, 3]); next(stream); state = llm.save_state()
sys.stdout.flush()
child = os.fork()
if child == 0:
    for use in (lambda: llm("x"), lambda: next(stream), lambda: llm.save_state(), lambda: llm.load_state(state), lambda: llm.ctx,
                lambda: llm.eval([5]), lambda: llm.sample(), lambda: llm.pcd_stats(), lambda: llm.n_ctx()):
        said(use)
    print(llm.tokenize(b"abc"), llm.detokenize([5, 6]))
    said(llm.close); said(lambda: llm.tokenize(b"abc"))
    own = new(); print(own("abc" * 20, max_tokens=9, temperature=0)["choices"] == alone); own.close()
    del llm, stream, own; gc.collect(); print("child ends", flush=True); sys.exit(7)
print(os.waitpid(child, 0)[1] >> 8, next(stream) >= 0)
print(llm("abc" * 20, max_tokens=9, temperature=0)["choices"] == alone)""",
    )
    assert len(lines) == 16
    for line in lines[:9]:
        assert line.startswith("PCDError: this process was forked with the model open, and the threads"), line
        assert 'multiprocessing.get_context("spawn")' in line
    assert lines[9] == "[1, 259, 260, 261, 262] b'\\x02\\x03'" and lines[10] == "returned None"
    assert lines[11].startswith(f"PCDError: {CLOSED}") and lines[12:14] == ["True", "child ends"]
    assert lines[14:] == ["7 True", "True"]


def test_a_model_goes_to_a_spawned_process(tiny: Tiny, load: Load) -> None:
    llm = load(tiny("llama"), {"beta": 2.0}, f16=True, engine="stock")
    ask = operator.methodcaller("create_completion", "abc", max_tokens=9, temperature=0)
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(ask, llm).result(timeout=60)["choices"] == ask(llm)["choices"]
        assert pool.submit(operator.attrgetter("engine"), llm).result(timeout=60) == "stock"
