"""Measures whether a decoding method helps a model, by how much, at what length, and whether that is more than chance.

    plan = Plan("model.gguf", tasks=("kv",), methods=("greedy", "pcd"), lengths=(2048,), n=300)
    outcome = evaluate(plan, Directory("run"))
    print(markdown(plan, outcome.records, outcome.refused))

A run that is stopped goes on where it was, with the same plan and directory.
"""

from pypcd.evaluation.executors import Cluster
from pypcd.evaluation.plan import Directory, Plan
from pypcd.evaluation.progress import Progress
from pypcd.evaluation.report import Row, advice, by_depth, markdown, rows
from pypcd.evaluation.run import ModelTokenizer, Outcome, evaluate, facts, run_options, tasks_of
from pypcd.evaluation.stats import Paired, paired
from pypcd.evaluation.tasks import GROUPS, TASKS, task
from pypcd.evaluation.tasks.sample import Sample, Task, Tokenizer

__all__ = [
    "GROUPS",
    "TASKS",
    "Cluster",
    "Directory",
    "ModelTokenizer",
    "Outcome",
    "Paired",
    "Plan",
    "Progress",
    "Row",
    "Sample",
    "Task",
    "Tokenizer",
    "advice",
    "by_depth",
    "evaluate",
    "facts",
    "markdown",
    "paired",
    "rows",
    "run_options",
    "task",
    "tasks_of",
]
