#!/usr/bin/env python3
"""Write questions of `pypcd eval --task kv-short` as tasks of lm-evaluation-harness, which need no network.

    python scripts/recipes/lm_eval_tasks.py MODEL --length 1000 --n 100 --out DIR
    python -m pypcd.integrations.lm_eval --model pypcd --model_args path=MODEL --include_path DIR --tasks values,values_choice,values_given

A JSON object has many keys with their values, and one value is asked for. values: it is written; values_choice: which of four
values of the object is the most probable answer; values_given: how probable the right one is. Prompts are at most --length
tokens long by the model's own tokenizer.
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
    "values": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16, "do_sample": False},
        "process_results": "!function values.found",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "values_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": "",  # the prompt ends with a space
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "values_given": {
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[gold]}}",
        "metric_list": [
            {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
            {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        ],
    },
}
FOUND = '''"""Whether an answer has the right value."""


def found(doc, results):
    return {"acc": float(doc["choices"][doc["gold"]] in results[0])}
'''


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--n", type=int, default=100, help="questions (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the folder for --include_path")
    args = parser.parse_args()

    with_tokens = pypcd.Llama(args.model, vocab_only=True)
    samples = task("kv-short").samples(args.n, args.length, ModelTokenizer(with_tokens), args.seed)
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "values.jsonl", "w", encoding="utf-8") as file:
        for sample in samples:
            (right,) = sample.answers
            rng = random.Random(sample.index)
            nearest = sample.extra["nearest"]
            others = sorted(set(re.findall(r': "([^"]+)"', sample.prompt.context)) - {right, nearest})
            choices = [*dict.fromkeys([right, nearest]), *rng.sample(others, 3)][:4]
            rng.shuffle(choices)
            text = sample.prompt.text + sample.prompt.answer_prefix
            file.write(json.dumps({"text": text, "choices": choices, "gold": choices.index(right)}) + "\n")
    (folder / "values.py").write_text(FOUND)
    for name, fields in TASKS.items():
        data = {"data_files": {"test": str(folder / "values.jsonl")}}
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test"}
        text = json.dumps({**whole, "doc_to_text": "{{text}}", **fields}, indent=2)  # JSON is YAML, but for a tag
        (folder / f"{name}.yaml").write_text(re.sub(r'"(!function [\w.]+)"', r"\1", text) + "\n")


if __name__ == "__main__":
    main()
