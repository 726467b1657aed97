"""Benchmarks: questions, and how their answers are scored.

kv = pypcd.evaluation.task("kv")
samples = kv.samples(100, 4096, ModelTokenizer(llm), seed=0)
kv.score(answer, samples[0])
"""

from __future__ import annotations

from pypcd.evaluation._sample import Sample, Task, Tokenizer
from pypcd.evaluation._tasks import TASKS, task
from pypcd.evaluation._tokenizer import ModelTokenizer

__all__ = ["TASKS", "ModelTokenizer", "Sample", "Task", "Tokenizer", "task"]
