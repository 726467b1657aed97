"""`lm_eval --model pypcd`: how the harness finds it, and what the real one makes of small tasks of our own."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import run_python
from test_packaging import PYPROJECT

import pypcd
from pypcd import _lm_eval
from pypcd._method import log_softmax

ROOT = Path(pypcd.__file__).parent.parent

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


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    for name, text in FAKE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    "code",
    [
        "import pypcd, lm_eval.models",
        "import lm_eval.models, pypcd",
        "import pypcd, lm_eval.models, importlib; importlib.reload(pypcd)",
        "import pypcd; from pypcd import _lm_eval; _lm_eval.install(); import lm_eval.models",
    ],
)
def test_it_is_a_model_of_the_harness_once_pypcd_is_imported(code: str, fake: Path) -> None:
    result = run_python(
        f"import sys; sys.path.insert(0, sys.argv[1]); {code}; {SHOW}; import lm_eval.models as m\n"
        "print(m.__spec__.loader.__class__.__name__, 'llama_cpp' in sys.modules)",
        fake,
    )
    assert result.returncode == 0, result.stderr
    models, rest = result.stdout.splitlines()
    assert json.loads(models) == {"dummy": "lm_eval.models:X", "pypcd": _lm_eval.HOME}
    assert rest == "SourceFileLoader False", "nothing of ours is loaded before it is asked for"


def test_the_entry_point_is_the_same(fake: Path) -> None:
    assert PYPROJECT["project"]["entry-points"]["lm_eval.models"] == {_lm_eval.NAME: _lm_eval.HOME}
    module, _, name = _lm_eval.HOME.partition(":")
    source = Path(ROOT, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    assert re.search(rf"^class {name}\(", source, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "imported"),
    [
        (["python", "/env/bin/lm_eval", "--model", "pypcd"], True),
        (["python", "/env/bin/lm-eval", "run"], True),
        (["python", "-m", "lm_eval", "--tasks", "x"], True),
        (["python", r"C:\env\Scripts\lm_eval.exe"], True),
        (["python", "/home/lm_eval/program.py", "a", "b", "lm_eval"], False),
        (["python", "-c", "import lm_eval"], False),
        (["python"], False),
    ],
)
def test_the_start_of_the_command_imports_pypcd_and_no_other_program_does(words: list[str], imported: bool) -> None:
    line = (ROOT / "cmake/pypcd-lm-eval.pth").read_text()
    assert line.startswith("import ") and line.count("\n") == 1, "site runs such lines alone"
    result = run_python(f"import sys; sys.orig_argv = {words!r}\n{line}\nprint('pypcd' in sys.modules)")
    assert result.stdout == f"{imported}\n", result.stderr


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
    """The command, as its own program runs it: with pypcd imported by the .pth file, which the wheel has."""
    env = {"HF_HOME": str(tasks / "hf"), "HF_HUB_OFFLINE": "1", **environment}
    line = (ROOT / "cmake/pypcd-lm-eval.pth").read_text()
    code = f"import sys; sys.orig_argv = ['python', 'lm_eval']\n{line}\nfrom lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    return run_python(code, *words, "--include_path", str(tasks), timeout=300, **env)


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
@pytest.mark.parametrize("pcd", ["off", "window:relative_top=0.1"])
def test_the_command(pcd: str, tasks: Path, tmp_path: Path) -> None:
    """What it logs is what pypcd.Llama computes for the same texts."""
    out = tmp_path / "out"
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
                wanted = plain_score(llm, request["arg_0"], request["arg_1"])
                assert float(value) == pytest.approx(wanted, abs=1e-2) and is_greedy in ("True", "False")
    llm.close()


def plain_score(llm: pypcd.Llama, context: str, continuation: str) -> float:
    tokens = llm.tokenize((context + continuation).encode(), special=True)
    n = len(llm.tokenize(context.encode(), special=True))
    llm.reset()
    llm.eval(tokens[:n])
    value = 0.0
    for token in tokens[n:]:
        row = pypcd._engine.row(llm)  # type: ignore[attr-defined]
        value += float(log_softmax(row)[token])
        llm.eval([token])
    return value
