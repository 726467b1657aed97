#!/usr/bin/env python3
"""Write pypcd's needles as tasks of lm-evaluation-harness, which need no network.

    python scripts/recipes/lm_eval_tasks.py MODEL --length 600 --n 100 --out DIR
    lm_eval --model pypcd --model_args path=MODEL --include_path DIR --tasks needles,needles_choice,needles_written

needles: the number is written. needles_choice: which of four numbers of the prompt is the most probable answer;
needles_written: how probable is the right one. Each prompt is one of RULER's niah-multikey-2, at most --length tokens long by
the model's own tokenizer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
from typing import Any

import pypcd
from pypcd.evaluation import ModelTokenizer, task

TASKS: dict[str, dict[str, Any]] = {
    "needles": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "process_results": "!function needles.found",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "needles_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "needles_written": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[gold]}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    },
}
FOUND = '''"""Whether an answer has the right number."""


def found(doc, results):
    return {"acc": float(doc["choices"][doc["gold"]] in results[0])}
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=600, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--n", type=int, default=100, help="questions (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder for --include_path")
    args = parser.parse_args()

    with_tokens = pypcd.Llama(args.model, vocab_only=True)
    samples = task("niah-multikey-2").samples(args.n, args.length, ModelTokenizer(with_tokens), args.seed)
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "needles.jsonl", "w", encoding="utf-8") as file:
        for sample in samples:
            (right,) = sample.answers
            rng = random.Random(sample.index)
            others = sorted(set(re.findall(r"\b\d{7}\b", sample.prompt.context)) - {right})
            choices = [right, *rng.sample(others, 3)]
            rng.shuffle(choices)
            text = sample.prompt.text + sample.prompt.answer_prefix
            file.write(json.dumps({"text": text, "choices": choices, "gold": choices.index(right)}) + "\n")
    (folder / "needles.py").write_text(FOUND)
    for name, fields in TASKS.items():
        data = {"data_files": {"test": str(folder / "needles.jsonl")}}
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        text = json.dumps({**whole, "doc_to_text": "{{text}}", **fields}, indent=2)  # JSON is YAML, but for a tag
        (folder / f"{name}.yaml").write_text(re.sub(r'"(!function [\w.]+)"', r"\1", text) + "\n")


if __name__ == "__main__":
    main()
