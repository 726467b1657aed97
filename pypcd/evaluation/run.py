"""Runs an evaluation: makes the missing answers of a plan, wherever questions are answered (executors)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import llama_cpp

import pypcd
from pypcd.decode import Method, Session, parse
from pypcd.engine import choose_engine
from pypcd.errors import MENDABLE, InputError, ModelError, PCDError
from pypcd.evaluation import executors
from pypcd.evaluation.executors import Cluster, Jobs, Record
from pypcd.evaluation.plan import Directory, Key, Plan
from pypcd.evaluation.progress import Progress
from pypcd.evaluation.tasks import task as task_named
from pypcd.evaluation.tasks.sample import Sample, Task, Tokenizer
from pypcd.gguf import DEMO_MODEL, parts, read_gguf, resolve_model
from pypcd.llama import Llama, machine, saved_state, threads
from pypcd.prompt import Prompt, prompt_tokens

__all__ = [
    "ModelTokenizer",
    "Outcome",
    "Record",
    "Worker",
    "context_of",
    "counts_of",
    "evaluate",
    "facts",
    "run_options",
    "tasks_of",
]

_SPARE = 256  # tokens besides prompt and answer, for an edit's own words
_BARE = 1024  # tokens for a prompt without its context
_THREADS = ("n_threads", "n_threads_batch")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        records: by task, length, index and method.
        refused: methods that this model cannot run, with the reason.
    """

    records: dict[Key, Record]
    refused: dict[str, str]


def facts(plan: Plan, options: Mapping[str, Any] | None = None, jobs: Jobs = 1) -> dict[str, Any]:
    """What a run depends on besides its plan: what tells the model's weights from others, versions, devices, options of the model.

    The number of threads is left out unless logits depend on it.

    Args:
        jobs: as in evaluate(). On a cluster they are those of a worker; each worker compares its own before it answers.

    Raises:
        FileNotFoundError: there is no such model, or a worker of a cluster does not have it.
        PCDError: the cluster has no workers, or one has no pypcd.
    """
    look = functools.partial(_facts, _anywhere(plan), options or {})
    return next(iter(jobs.everywhere(look).values())) if isinstance(jobs, Cluster) else look()


def _facts(plan: Plan, options: Mapping[str, Any]) -> dict[str, Any]:
    path, n_ctx = resolve_model(plan.model), context_of(plan, options)
    no_matter = ["n_ctx"]  # a run may be continued with other values of these
    if _threads_matter(plan, options):
        options = run_options(plan, options)
    else:
        no_matter += _THREADS
    options = {name: value for name, value in options.items() if name not in no_matter}
    has_gpu = machine.has_gpu(options)
    if not has_gpu:
        options.pop("n_gpu_layers", None)
    on_gpu = has_gpu and options.get("n_gpu_layers") != 0
    return {
        "weights": " ".join(map(saved_state.fingerprint, parts(path))),
        "model_bytes": os.path.getsize(path),
        "options": options,
        "rope_factors": read_gguf(path).rope_factors(n_ctx),
        "devices": [device["description"] for device in machine.devices() if on_gpu or not device["is_gpu"]],
        "pypcd": pypcd.__version__,
        "llama_cpp_python": llama_cpp.__version__,
    }


def _threads_matter(plan: Plan, options: Mapping[str, Any]) -> bool:
    """Whether logits depend on the number of threads: with flash attention, in layers that the CPU computes."""
    gpu, on_gpu = machine.has_gpu(options), options.get("n_gpu_layers")
    flash_attn = options.get("flash_attn")
    if flash_attn is None:
        flash_attn = gpu and on_gpu != 0  # pypcd.Llama's default
    caches = [method.cache for method in map(parse, plan.methods)]
    flash_attn = flash_attn or any(cache and cache.options.get("flash_attn") for cache in caches)
    return bool(flash_attn) and not (gpu and on_gpu in (None, -1))


def _anywhere(plan: Plan) -> Plan:
    """The plan with paths that do not depend on this process's folder. The model "demo" comes with pypcd, everywhere."""
    path = resolve_model(plan.model)
    model = plan.model if path == str(DEMO_MODEL) else os.path.abspath(path)
    return dataclasses.replace(plan, model=model)


def _made_there(plan: Plan, options: Mapping[str, Any], run: Mapping[str, Any]) -> Worker:
    """A worker of a cluster, once that is known to have the same files, versions and devices as the run."""
    try:
        for name, value in _facts(plan, options).items():
            if value != run[name]:
                raise PCDError(
                    f"{name} is {value!r} there, but {run[name]!r} in the run; all workers of a run need the same model file, "
                    "versions and kind of device, since devices round differently"
                )
        return Worker(plan, options)
    except (*MENDABLE, OSError) as error:
        raise type(error)(f"{platform.node()}: {error}") from None


def run_options(plan: Plan, options: Mapping[str, Any], jobs: Jobs = 1) -> dict[str, Any]:
    """The options of the model in each process, with numbers of threads that stay for the whole run.

    They are those given, else for several processes a share of the cores (the smallest one, if machines differ), else those of
    pypcd.Llama.

    Raises:
        FileNotFoundError, ModelError: there is no such model.
        PCDError: the cluster cannot be reached.
    """
    resolve_model(plan.model)  # a wrong one is said before anything is done
    decode, batch = (options.get(name) for name in _THREADS)
    if decode is None:
        decode = executors.n_threads(jobs)
    if decode is None or batch is None:
        flash_attn = {"flash_attn": True} if _threads_matter(plan, options) else {}
        decode, batch, _ = threads.choose({**options, **flash_attn}, decode, batch)
    return {**options, **dict(zip(_THREADS, (decode, batch)))}


def context_of(plan: Plan, options: Mapping[str, Any]) -> int:
    """The context that the longest prompt needs, with all answers to it; n_ctx, if it is among the options."""
    if options.get("n_ctx"):
        return int(options["n_ctx"])
    methods, tasks = [parse(name) for name in plan.methods], tasks_of(plan).values()
    n_answer = max(plan.max_tokens or task.max_tokens for task in tasks)
    longest = max(plan.lengths) * (2 if any(task.may_exceed for task in tasks) else 1)
    longest += max(method.n_added for method in methods)
    n_bare = _BARE if any(method.rows.n_sequences > 1 for method in methods) else 0
    return longest + _SPARE + max(method.n_sequences for method in methods) * n_answer + n_bare


def evaluate(
    plan: Plan,
    directory: Directory,
    *,
    jobs: Jobs = 1,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    only: Callable[[Key], bool] | None = None,
) -> Outcome:
    """Make the answers that a directory does not have yet, and write each one there at once.

    A sample's prompt is evaluated once, from an empty cache, for all methods that can share it. So an answer does not
    depend on earlier answers or on the number of processes.

    Args:
        jobs: number of processes, each with the model; weights are mapped into memory once. Or a Cluster.
        options: further arguments of pypcd.Llama; see run_options().
        progress: updated with what is to be answered, and with each answer.
        only: which of the plan's answers are wanted now; None: all.

    Raises:
        ValueError: a task or method is unknown, a length is too short, or the directory holds another run.
        ModelError: the model cannot be loaded.
        PCDError: a process ended early; a cluster is lost, its workers differ, or as facts().
    """
    for name in plan.methods:
        parse(name)
    counts = counts_of(plan)
    options = run_options(plan, options or {}, jobs)
    with directory.locked():
        known = facts(plan, options, jobs)
        records = directory.open(plan, known)
        asked = {key[:3]: record["prompt_sha256"] for key, record in records.items() if record["prompt_sha256"]}

        keys = [key for key in plan.everything(counts) if only is None or only(key)]
        # answers that failed are tried again
        missing = [key for key in keys if records.get(key, {"error": ""}).get("error") is not None]
        todo: dict[tuple[str, int, int], list[str]] = {}
        for task, length, index, method in missing:
            todo.setdefault((task, length, index), []).append(method)
        progress = progress or Progress()
        progress.begin(keys, missing)

        refused: dict[str, str] = {}
        make = functools.partial(Worker, _anywhere(plan), options)
        if isinstance(jobs, Cluster):
            make = functools.partial(_made_there, _anywhere(plan), options, known)
        for key, record in executors.ask(jobs, make, todo):
            if isinstance(record, str):
                refused[key[3]] = record
                progress.answered(key, None)
                continue
            prompt = record["prompt_sha256"]
            if prompt and asked.setdefault(key[:3], prompt) != prompt:
                raise InputError(
                    f"{directory.path} has answers to another question {key[2]} of {key[0]} at {key[1]} tokens (made by "
                    "other versions or from other files); give another directory"
                )
            directory.append(record)
            records[key] = record
            progress.answered(key, record.get("seconds", 0.0))
        wanted = set(keys)
        return Outcome({key: record for key, record in records.items() if key in wanted}, refused)


def tasks_of(plan: Plan) -> dict[str, Task]:
    """A plan's tasks by name."""
    return {name: task_named(name) for name in plan.tasks}


def counts_of(plan: Plan) -> dict[str, int]:
    """How many questions each task has in a cell."""
    return {name: min(plan.n, made.n_questions or plan.n) for name, made in tasks_of(plan).items()}


class ModelTokenizer:
    """The tokenizer of a llama_cpp.Llama, as tasks need it (tasks.sample.Tokenizer).

    Args:
        chat: whether prompts go through the model's chat template.
    """

    def __init__(self, llm: Any, *, chat: bool = False) -> None:
        self.llm, self.chat = llm, chat

    def count(self, prompt: Prompt) -> int:
        return len(prompt_tokens(self.llm, prompt, chat=self.chat))

    def encode(self, text: str) -> list[int]:
        return list(self.llm.tokenize(text.encode("utf-8", "replace"), special=False))


def _own_context(method: Method, engine: str | None) -> tuple[object, ...]:
    """What a method's context has that others lack: a micro-batch as large as a prompt, which takes much memory, the types of
    its cache, or another engine."""
    return method.rows.whole_prompt, method.cache, choose_engine(engine, method.rows.pcd)


class Worker:
    """A model that answers samples."""

    def __init__(self, plan: Plan, options: Mapping[str, Any]) -> None:
        self.plan = plan
        self._tasks = tasks_of(plan)
        self._methods = methods = {name: parse(name) for name in plan.methods}
        self._pool: tuple[Prompt, ...] = ()
        self._pooled = methods
        n_ctx = context_of(plan, options)
        settings = {"n_seq_max": max(method.n_sequences for method in methods.values()), **options, "n_ctx": n_ctx}
        self.llm = Llama(plan.model, **settings)
        self._contexts = {_own_context(Method(""), options.get("engine")): Session(self.llm)}
        self._sessions: dict[str, Session] = {}  # of each method
        self.refused: dict[str, str] = {}
        for name, method in methods.items():  # some need a context of their own
            own = _own_context(method, options.get("engine"))
            try:
                if own not in self._contexts:
                    batch = {"n_batch": n_ctx, "n_ubatch": n_ctx} if method.rows.whole_prompt else {}
                    types = method.cache.options if method.cache else {}
                    llm = Llama(plan.model, **{**settings, **batch, **types, "engine": own[-1]})
                    self._contexts[own] = Session(llm)
            except (InputError, ModelError) as error:
                why = f"it needs prompts in one micro-batch, here of {n_ctx} tokens: {error}"
                self.refused[name] = why if method.rows.whole_prompt else str(error)
                continue
            self._sessions[name] = self._contexts[own]
            refusal = method.with_pool(_A_PROMPT).refusal(self._sessions[name].llm, chat=plan.chat)
            if refusal is not None:
                self.refused[name] = refusal
        self._tokenizer = ModelTokenizer(self.llm, chat=plan.chat)
        self._counts = counts_of(plan)
        self._cells: dict[tuple[str, int], tuple[list[Sample], tuple[Prompt, ...]]] = {}
        for task in self._tasks.values():
            for length in plan.lengths:
                _samples(task, 1, length, self._tokenizer, plan.seed)  # fails now if the length is far too short
        # methods without an edit share the cached prompt, so they come first; an edit makes another prompt
        self._order = sorted(methods, key=lambda name: (methods[name].edit is not None, plan.methods.index(name)))

    def close(self) -> None:
        for session in self._contexts.values():
            session.llm.close()

    def cell(self, name: str, length: int) -> tuple[list[Sample], tuple[Prompt, ...]]:
        """The questions of a cell, and its pool: other questions, for methods that need some."""
        if (name, length) not in self._cells:
            plan, task = self.plan, self._tasks[name]
            samples = _samples(task, self._counts[name], length, self._tokenizer, plan.seed)
            asked = dict.fromkeys(sample.prompt for sample in samples)
            # a file has few questions: some drawn for the pool are asked too; if too few remain, asked ones fill it
            n_others = plan.n_pool if task.n_questions is None else min(plan.n_pool + len(asked), task.n_questions)
            others = [sample.prompt for sample in _samples(task, n_others, length, self._tokenizer, plan.seed + 1)]
            pool = [*(prompt for prompt in others if prompt not in asked), *asked][: plan.n_pool + 1]
            self._cells = {(name, length): (samples, tuple(pool))}
        return self._cells[name, length]

    def answer(self, name: str, length: int, index: int, methods: list[str]) -> Iterator[tuple[Key, Record | str]]:
        samples, pool = self.cell(name, length)
        others = tuple(prompt for prompt in pool if prompt != samples[index].prompt)[: self.plan.n_pool]
        if others != self._pool:  # most questions of a cell have the same
            self._pool = others
            self._pooled = {method: made.with_pool(others) for method, made in self._methods.items()}
        for method in self._order:
            if method in methods:
                key = name, length, index, method
                refusal = self.refused.get(method)
                yield key, refusal or self._record(key, samples[index], self._pooled[method])
        for session in self._contexts.values():
            session.clear()  # the next sample starts from an empty cache too

    def _record(self, key: Key, sample: Sample, method: Method) -> Record:
        asked = "".join(piece.text for _, message in sample.prompt.turns for piece in message)
        begun: Record = {
            "task": key[0],
            "length": key[1],
            "index": key[2],
            "method": key[3],
            "prompt_sha256": hashlib.sha256(asked.encode("utf-8", "replace")).hexdigest()[:16],
            "depth": sample.depth,
            "answers": list(sample.answers),
        }
        task = self._tasks[key[0]]
        how = {"max_tokens": self.plan.max_tokens or task.max_tokens, "stop": task.stop, "chat": self.plan.chat}
        try:
            answer = method.generate(self._sessions[key[3]], sample.prompt, **how)
        except MENDABLE as error:  # only this question failed: go on with the others
            return {**begun, "error": str(error), "score": 0.0, "n_tokens": 0}
        return {
            **begun,
            "prediction": answer.text,
            "score": task.score(answer.text, sample),
            "n_prompt": answer.n_prompt,
            "n_tokens": len(answer.tokens),
            "seconds": round(answer.seconds, 4),
        }


def _samples(task: Task, n: int, length: int, tokenizer: Tokenizer, seed: int) -> list[Sample]:
    try:
        return task.samples(n, length, tokenizer, seed)
    except InputError as error:
        raise InputError(f"{task.name} at length {length}: {error}") from error


_A_PROMPT = (Prompt(after="-"),)
