"""llama-cpp-python's own tests, run on pypcd: its library, then pypcd.Llama in place of llama_cpp.Llama, PCD off and on.

PYPCD_UPSTREAM_TESTS names the folder `tests` of its source distribution (scripts/ has what fetches it). Models that
those tests would download are replaced by tiny ones of the same kind; tests that need a certain model's words are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Tiny

import pypcd

PLUGIN = """
import importlib.util, json, os, sys, types
import pytest
import pypcd
import llama_cpp

case = json.loads(os.environ["PYPCD_UPSTREAM_CASE"])

class Llama(pypcd.Llama):
    made = 0
    def __init__(self, model_path, **kwargs):
        super().__init__(model_path, pcd=case["pcd"] and not kwargs.get("vocab_only"), **kwargs)
        Llama.made += 1
        if case["pcd"] and not kwargs.get("vocab_only"):
            assert self.pcd is not None

if case["class"]:
    llama_cpp.Llama = Llama

def hf_hub_download(repo_id, filename):
    for part, path in case["models"].items():
        if part in filename:
            return path
    pytest.skip(f"needs {filename}")

sys.modules["huggingface_hub"] = types.SimpleNamespace(hf_hub_download=hf_hub_download, __spec__=None)
if importlib.util.find_spec("scipy") is None:  # imported there and not used
    sys.modules["scipy"] = types.ModuleType("scipy")
    sys.modules["scipy.special"] = types.SimpleNamespace(log_softmax=None)

def pytest_sessionfinish(session):
    assert hasattr(llama_cpp.llama_cpp._lib, "llama_pcd_version")
    assert Llama.made > 0 or not case["class"]
"""
# what runs without a download: found by running all of it
NEEDS_NO_MODEL = {
    "test_llama_cpp_version",
    "test_llama_cpp_tokenization",
    "test_mistral_instruct",
    "test_hf_tokenizer_config_str_to_chat_formatter",
    "test_grammar_from_string",
    "test_composed_pydantic_grammar",
    "test_grammar_anyof",
    "test_find_candidate_pred_tokens",
}
ON_ANY_TRANSFORMER = {
    f"test_{name}_matches_fresh[llama_cpp_transformer_model_path-False-False]"
    for name in (
        "exact_cached_prompt_reuse",
        "loaded_exact_cached_prompt_reuse",
        "ram_cache_exact_prompt_hit",
        "shorter_prompt_prefix_reuse",
    )
}
RECURRENT = {"test_recurrent_model_prompt_cache_reset"} | {
    name.replace("transformer", "recurrent").replace("False", "True", 1) for name in ON_ANY_TRANSFORMER
}


@pytest.fixture(scope="module")
def upstream() -> Path:
    folder = os.environ.get("PYPCD_UPSTREAM_TESTS")
    if not folder:
        pytest.skip("PYPCD_UPSTREAM_TESTS does not name the tests of llama-cpp-python's source distribution")
    assert (Path(folder) / "test_llama.py").exists(), f"PYPCD_UPSTREAM_TESTS={folder} holds no test_llama.py"
    return Path(folder).resolve()


@pytest.mark.parametrize(
    ("llama", "pcd"),
    [
        (False, False),
        (True, False),
        (True, True),
        (True, {"cache": "shared", "evaluation": "alternate"}),
        (True, "window"),
    ],
    ids=["library", "class", "on", "alternate-shared", "window"],
)
def test_llama_cpp_pythons_own_tests_pass(llama: bool, pcd: Any, upstream: Path, tiny: Tiny, tmp_path: Path) -> None:
    # a folder without the distribution's own llama_cpp, which would hide the installed one
    vocab = Path("vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf")
    shutil.copytree(upstream, tmp_path / "tests")
    (tmp_path / vocab).parent.mkdir(parents=True)
    shutil.copy(upstream.parent / vocab, tmp_path / vocab)
    (tmp_path / "pypcd_upstream.py").write_text(PLUGIN)
    models = {"stories15M": str(tiny("llama", n_vocab=1000))}
    if llama and not pcd:
        models["mamba"] = str(tiny("mamba", n_vocab=1000))
    case = {"class": llama, "pcd": pcd, "models": models}
    path = os.pathsep.join([str(tmp_path), str(Path(pypcd.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "pypcd_upstream", "-p", "no:cacheprovider", "-c", os.devnull]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "--junitxml", str(tmp_path / "report.xml"), "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PYPCD_UPSTREAM_CASE": json.dumps(case), "PYTHONDONTWRITEBYTECODE": "1"},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = ElementTree.parse(tmp_path / "report.xml").getroot().iter("testcase")
    passed = {case.get("name") for case in cases if not len(case)}
    assert NEEDS_NO_MODEL | ON_ANY_TRANSFORMER | (RECURRENT if llama and not pcd else set()) <= passed
