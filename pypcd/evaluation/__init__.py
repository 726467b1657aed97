"""Measures whether a decoding method helps a model, by how much, at what length, and whether that is more than chance.

    plan = Plan("model.gguf", tasks=("kv",), methods=("greedy", "pcd"), lengths=(2048,), n=300)
    outcome = evaluate(plan, Directory("run"))
    print(markdown(plan, outcome.records, {"kv": "accuracy"}, outcome.refused))

A run that is stopped goes on where it was, with the same plan and directory.
"""

from pypcd.evaluation._balance import Balance, Run, balance, balance_csv, balance_markdown, read_run
from pypcd.evaluation._cluster import Cluster
from pypcd.evaluation._formula import Formula
from pypcd.evaluation._paper import PAPER_TABLES, PaperTable
from pypcd.evaluation._plan import Directory, Plan
from pypcd.evaluation._progress import Progress
from pypcd.evaluation._report import Row, by_depth, csv_text, markdown, rows
from pypcd.evaluation._rows import record
from pypcd.evaluation._run import Outcome, counts_of, evaluate, facts, run_options, tasks_of
from pypcd.evaluation._screen import Agreement, Scored, Screen, agreement, score
from pypcd.evaluation._stats import Paired, paired
from pypcd.evaluation._tokenizer import ModelTokenizer
from pypcd.evaluation._tune import Tuned, Weighed, tune
from pypcd.evaluation.tasks import GROUPS, TASKS, task
from pypcd.evaluation.tasks._sample import Sample, Task, Tokenizer

__all__ = [
    "GROUPS",
    "PAPER_TABLES",
    "TASKS",
    "Agreement",
    "Balance",
    "Cluster",
    "Directory",
    "Formula",
    "ModelTokenizer",
    "Outcome",
    "Paired",
    "PaperTable",
    "Plan",
    "Progress",
    "Row",
    "Run",
    "Sample",
    "Scored",
    "Screen",
    "Task",
    "Tokenizer",
    "Tuned",
    "Weighed",
    "agreement",
    "balance",
    "balance_csv",
    "balance_markdown",
    "by_depth",
    "counts_of",
    "csv_text",
    "evaluate",
    "facts",
    "markdown",
    "paired",
    "read_run",
    "record",
    "rows",
    "run_options",
    "score",
    "task",
    "tasks_of",
    "tune",
]
