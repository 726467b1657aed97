"""`python -m pypcd.integrations.lm_eval --model pypcd`: how the harness finds it, and what the real one makes of small tasks of our own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Tiny, rounding_of, run_python
from test_texts import stock_scores
from tiny_gguf import CHAT_TEMPLATE

import pypcd
from pypcd.integrations import lm_eval

# -- how it is found -----------------------------------------------------------------------------------------------------

FAKE = {  # as much of lm_eval 0.4.13 as knows models
    "lm_eval/__init__.py": "",
    "lm_eval/api/__init__.py": "",
    "lm_eval/api/registry.py": (
        "class Registry(dict):\n"
        "    def register(self, name, *, target):\n"
        "        assert name not in self\n"
        "        self[name] = target\n"
        "model_registry = Registry()\n"
    ),
    "lm_eval/models/__init__.py": (
        "from lm_eval.api.registry import model_registry\nmodel_registry.register('dummy', target='lm_eval.models:X')\n"
    ),
}
SHOW = "import json; from lm_eval.api.registry import model_registry; print(json.dumps(model_registry))"


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m pypcd.integrations.lm_eval`."""
    code = "import runpy, sys; sys.argv[0] = 'lm_eval'; runpy.run_module('pypcd.integrations.lm_eval', run_name='__main__')"
    return run_python(code, *words, timeout=300, **environment)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_command_is_the_harnesss_own_with_our_model_among_its(fake: Path) -> None:
    (fake / "lm_eval/__main__.py").write_text(
        f"import sys\ndef cli_evaluate():\n    import lm_eval.models\n    {SHOW}\n    print(*sys.argv[1:])\n"
    )
    done = command("--model", "pypcd", PYTHONPATH=os.pathsep.join([str(fake), *filter(None, sys.path)]))
    assert done.returncode == 0, done.stderr
    models, words = done.stdout.splitlines()
    assert json.loads(models) == {"dummy": "lm_eval.models:X", "pypcd": lm_eval.HOME}
    assert words == "--model pypcd"


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_without_the_harness_the_command_names_the_extra() -> None:
    done = command()
    assert done.returncode == 1 and "lm_eval is not installed; pip install 'lm_eval>=0.4.10'" in done.stderr


# -- the real harness ------------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")

QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "Rome"], 0),
    ("The opposite of hot is", ["warm", "cold", "red"], 1),
    ("Two plus two equals", ["five", "six", "four"], 2),
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "words": {
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{q}} {{choices[gold]}}. {{q}} {{choices[gold]}}.",
        "metric_list": [{"metric": "byte_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    lines = [json.dumps({"q": q, "choices": choices, "gold": gold}) for q, choices, gold in QUESTIONS]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    for name, task in TASKS.items():
        data = {"data_files": {"test": str(tmp_path / "data.jsonl")}}
        whole = {"task": f"our_{name}", "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **task}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return tmp_path


def harness(tasks: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"HF_HOME": str(tasks / "hf"), "HF_HUB_OFFLINE": "1", **environment}
    return command(*words, "--include_path", str(tasks), **env)


def model_args(**values: Any) -> str:
    return ",".join(
        f"{name}={value}" for name, value in {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, **values}.items()
    )


def results(folder: Path) -> dict[str, Any]:
    (file,) = folder.rglob("results_*.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    (file,) = folder.rglob(f"samples_our_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@real
@pytest.mark.parametrize(
    ("pcd", "engine"), [("off", "native"), ("window:relative_top=0.1", "native"), ("window:relative_top=0.1", "stock")]
)
def test_the_command(pcd: str, engine: str, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it logs is what pypcd.Llama computes for the same texts."""
    out = tmp_path / "out"
    monkeypatch.setenv("PYPCD_ENGINE", engine)  # of the command
    words = ["--model", "pypcd", "--model_args", model_args(path="demo", pcd=pcd), "--tasks"]
    words += ["our_choices,our_words,our_perplexity", "--log_samples", "--output_path", str(out), "--batch_size", "4"]
    done = harness(tasks, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "our_choices" in done.stdout
    info = results(out)["config"]
    assert info["pcd"] == ("off" if pcd == "off" else pypcd.PCDConfig.resolve(pcd).describe())  # type: ignore[union-attr]
    assert info["n_ctx"] == 512 and info["model_num_parameters"] > 1e6

    llm = pypcd.Llama("demo", pcd=pcd, n_ctx=512, n_threads=1, n_threads_batch=1)
    for sample in samples(out, "words"):
        prompt = sample["arguments"]["gen_args_0"]["arg_0"]
        made = llm(prompt, max_tokens=6, temperature=0.0, stop=["\n"])
        assert sample["resps"] == [[made["choices"][0]["text"]]]
    if pcd == "off":
        for sample in samples(out, "choices"):
            for i, [[value, is_greedy]] in enumerate(sample["resps"]):
                request = sample["arguments"][f"gen_args_{i}"]
                tokens = llm.tokenize((request["arg_0"] + request["arg_1"]).encode(), special=True)
                n = len(llm.tokenize(request["arg_0"].encode(), special=True))
                ((wanted, best),) = stock_scores(llm, [(tokens[:n], tokens[n:])])
                limit = sum(rounding_of_score(llm, tokens[:k], 1) for k in range(n, len(tokens)))
                assert float(value) == pytest.approx(wanted, abs=limit) and is_greedy == str(best)
    llm.close()


@real
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("pcd=unsure", "model_args has no path; write --model_args path=model.gguf"),
        ("path=demo,n_ctxx=512", r"model_args has 'n_ctxx', which is unknown \(did you mean 'n_ctx'\?\); allowed: "),
        ("path=demo,pcd=unsuer", r"pcd is 'unsuer', which is not a setting \(did you mean 'unsure'\?\); allowed: "),
        ("path=demo,pcd=paper:sequences=chosen", "sequences is 'chosen', which contrasts nothing here; allowed: 'all'"),
        ("path=nowhere.gguf", "nowhere.gguf"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(args: str, message: str) -> None:
    from lm_eval import simple_evaluate  # type: ignore[import-not-found]

    lm_eval.register()

    with pytest.raises((TypeError, ValueError, OSError), match=message) as caught:
        simple_evaluate(model="pypcd", model_args=args, tasks=["of no matter"])
    assert "\n" not in str(caught.value)


# -- the model itself, in this process -----------------------------------------------------------------------------------


class Request:
    """As much of the harness's Instance as a model sees."""

    def __init__(self, *args: Any) -> None:
        self.args = args


@pytest.fixture
def make(tiny: Tiny) -> Iterator[Callable[..., Any]]:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm_eval is not installed")
    from pypcd.integrations.harness import HarnessModel

    made: list[Any] = []

    def one(**kwargs: Any) -> Any:
        path = tiny("llama", chat_template=kwargs.pop("chat_template", None))
        made.append(HarnessModel(path, **{"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, **kwargs}))
        return made[-1]

    yield one
    for model in made:
        model.llm.close()


def test_tokens_are_as_the_harness_defines_them(make: Callable[..., Any]) -> None:
    model, without = make(), make(add_bos_token=False)
    bos = model.llm.token_bos()
    assert model.prefix_token_id == bos == 1 and model.eot_token_id == 2 and model.max_length == 256
    assert model.tok_encode("tene")[0] == bos != model.tok_encode("tene", add_special_tokens=False)[0]
    assert model.tok_encode("<s>tene").count(bos) == 1, "a chat template may have written it already"
    assert without.tok_encode("tene") == model.tok_encode("tene")[1:]
    context, rest = model._encode_pair("tene  ", "mu")  # spaces at the end belong to the continuation
    assert context == model.tok_encode("tene") and context + rest == model.tok_encode("tene  mu")
    assert model.tok_decode(rest).strip() == "mu"
    # an empty context is BOS, and a text is scored whole
    ((empty, _),) = model.loglikelihood([Request("", "tene mu")], True)
    (rolled,) = model.loglikelihood_rolling([Request("tene mu")], True)
    text = model.tok_encode("tene mu")
    assert empty == pytest.approx(rolled, abs=rounding_of_score(model.llm, text, len(text)))


def test_long_texts_lose_their_beginning_with_a_note(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    context, rest = list(range(3, 303)), [7, 8, 9]
    ((cut, _),) = model._loglikelihood_tokens([(None, context, rest)], True)
    assert "1 of 1 texts are longer than the context of 256 tokens" in caplog.text
    ((whole, _),) = model._loglikelihood_tokens([(None, context[-254:], rest)], True)
    assert cut == whole
    with pytest.raises(
        ValueError, match="has 257 tokens; allowed: at most n_ctx, 256; load the model with a larger n_ctx"
    ):
        model._loglikelihood_tokens([(None, context, list(range(3, 260)))], True)
    with pytest.raises(ValueError, match="a request has no text to be scored"):
        model._loglikelihood_tokens([(("a", ""), context, [])], True)


def test_a_long_text_is_scored_in_windows_each_token_once(make: Callable[..., Any]) -> None:
    model = make()
    text = "tene mu ka lo " * 50
    tokens = model.tok_encode(text, add_special_tokens=False)
    assert 256 < len(tokens) < 512
    (total,) = model.loglikelihood_rolling([Request(text)], True)
    windows = [([1], tokens[:256]), (tokens[-257:256], tokens[256:])]
    limit = rounding_of_score(model.llm, tokens[:200], len(tokens))
    assert total == pytest.approx(sum(value for _, value, _ in model.texts.score(windows)), abs=limit)


def test_generation_takes_what_the_harness_gives(make: Callable[..., Any]) -> None:
    model = make(batch_size=3)
    contexts = ["tene mu", "ka", "tene mu"]

    def written(**kwargs: Any) -> list[str]:
        made: list[str] = model.generate_until([Request(text, kwargs) for text in contexts], True)
        return made

    greedy = written(until=[], max_gen_toks=8)
    assert (
        greedy[0] == greedy[2]
        and written(until=greedy[0][3:5], max_gen_toks=8)[0] == greedy[0].split(greedy[0][3:5])[0]
    )
    drawn = written(do_sample=True, temperature=1.0, max_gen_toks=8)
    assert drawn[0] != drawn[2] and drawn == written(do_sample=True, temperature=1.0, max_gen_toks=8), "repeats differ"
    assert drawn != written(do_sample=True, temperature=1.0, max_gen_toks=8, seed=5)
    with pytest.raises(
        ValueError, match=r"gen_kwargs has 'top_q', which is unknown \(did you mean 'top_p'\?\); allowed: until, "
    ):
        written(top_q=1)
    with pytest.raises(ValueError, match="max_gen_toks is 256; allowed: an integer from 1 to 255"):
        written()


def test_chat_templates(make: Callable[..., Any]) -> None:
    model = make(chat_template=CHAT_TEMPLATE)
    talk = [{"role": "user", "content": "tene"}, {"role": "assistant", "content": "mu"}]
    assert model.apply_chat_template(talk[:1]) == "<user>tene\n<assistant>"
    assert model.apply_chat_template(talk, add_generation_prompt=False) == "<user>tene\n<assistant>mu"
    assert model.chat_template(True) == CHAT_TEMPLATE and model.chat_template(False) is None
    assert model.tokenizer_name != make().tokenizer_name, "prompts that --cache_requests keeps depend on it"
    with pytest.raises(ValueError, match="apply_chat_template is 'rag'; allowed: no name"):
        model.chat_template("rag")
    with pytest.raises(pypcd.PCDError, match="this model has no chat template; leave out --apply_chat_template"):
        make().apply_chat_template(talk)
    strict = make(
        chat_template="{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + CHAT_TEMPLATE
    )
    assert strict.apply_chat_template([{"role": "system", "content": "ne"}, talk[0]]) == "<user>tene\n<assistant>"


def rounding_of_score(llm: pypcd.Llama, text: list[int], n: int) -> float:
    """How much the score of n tokens may differ: each by its own logit and by those that it is normalised with."""
    return 2 * n * rounding_of(llm, text)
