"""docs/recipes.md's recipe for lm-evaluation-harness, against the real package."""

# ruff: noqa: F401, F811  fixtures are imported

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipe import Folder, N, check_greedy, folder, needs, recipe, with_setting

needs("lm_eval", "lm-evaluation-harness")

TASK: dict[str, Any] = {
    "task": "our_question",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{right}}",
    "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": N},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def scores(folder: Folder, setting: Any) -> tuple[str, float]:
    """The answer to our question, and its score, by the recipe's command with our task in place of its own."""
    data, out = folder.path / "data.jsonl", folder.path / f"results-{setting}"
    data.write_text(json.dumps({"question": folder.question, "right": folder.right}), encoding="utf-8")
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder.path / "ours.yaml").write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    text = with_setting(recipe("lm-evaluation-harness", "sh"), setting).strip()
    for name, value in (
        ("arc_easy", "our_question --include_path ."),
        ("--output_path results", f"--output_path {out}"),
    ):
        assert name in text
        text = text.replace(name, value)
    done = folder.command(["sh", "-c", text])
    assert done.returncode == 0, done.stdout + done.stderr
    (samples,), (results,) = out.rglob("samples_our_question_*.jsonl"), out.rglob("results_*.json")
    (sample,) = (json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines())
    of_task = json.loads(results.read_text(encoding="utf-8"))["results"]["our_question"]
    return sample["resps"][0][0], of_task["exact_match,none"]


def test_the_recipes_answers_and_scores_are_llamas(folder: Folder) -> None:
    found = {}

    def ask(setting: Any) -> str:
        answer, found[setting] = scores(folder, setting)
        return answer

    check_greedy(folder, ask)
    assert sorted(found.values()) == [0.0, 1.0]
