"""What the subcommands share: options, the sampling settings, loading the model with PCD on where it can run."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import math
import os
import random
import textwrap
from collections.abc import Callable
from typing import Any

import pypcd
from pypcd import ModelError, PCDConfig, UnsupportedError, _engine, evaluation, methods
from pypcd._cli import _terminal
from pypcd._config import parse_pcd
from pypcd._errors import did_you_mean
from pypcd._gguf import resolve_model
from pypcd._profile import is_profile, other_model

# Where texts are read by people: the paper's setting lifts tokens that a small model itself thinks improbable, and gains no
# more where PCD is wanted (docs/evidence.md).
DEFAULT_PCD = "cautious"

# name -> (lowest, highest, what is allowed)
_RANGES = {
    "temperature": (0, 100, "a number from 0 (the most probable token) to 100"),
    "top_p": (0, 1, "a number from 0 to 1"),
    "top_k": (0, 2**31 - 1, "an integer of at least 0; 0 keeps all tokens"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repeat_penalty": (0.01, 100, "a number from 0.01 to 100; 1 is none"),
    "max_tokens": (0, 2**31 - 1, "an integer of at least 0; 0 goes on until the context is full"),
    "seed": (0, 2**32 - 2, "an integer from 0 to 4294967294, or 'random'"),
}


@dataclasses.dataclass
class Sampling:
    """How tokens are drawn. The temperature is 0: greedy, as in the paper, and the same again each time."""

    temperature: float = 0.0
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    max_tokens: int = 1024
    seed: int | None = None  # None: another one for each answer

    def set(self, name: str, value: object) -> str:
        """Set a field, from text too. Returns the field's name.

        Raises:
            ValueError: there is no such field, or the value is out of range; the message says what is allowed.
        """
        name = {"temp": "temperature"}.get(name, name).replace("-", "_")
        if name not in _RANGES:
            raise ValueError(
                f"there is no setting {name!r}{did_you_mean(name, _RANGES)}; there are: {', '.join(_RANGES)}"
            )
        if name == "seed" and value in ("random", None):
            self.seed = None
            return name
        low, high, allowed = _RANGES[name]
        whole = name in ("top_k", "max_tokens", "seed")
        try:
            number = int(str(value)) if whole else float(str(value))
        except ValueError:
            number = math.nan
        if not low <= number <= high:
            raise ValueError(f"{name} is {value}; allowed: {allowed}")
        setattr(self, name, number)
        return name

    def draw_seed(self) -> int:
        return random.randrange(2**32 - 1) if self.seed is None else self.seed

    def describe(self) -> str:
        values = {**dataclasses.asdict(self), "seed": "random" if self.seed is None else self.seed}
        return "  ".join(f"{name}={value}" for name, value in values.items())


def pcd_setting(text: str, model: str) -> PCDConfig | None:
    """parse_pcd(), with a note where it is a profile of another model."""
    config = parse_pcd(text)
    note_of_profile(text, resolve_model(model))
    return config


def note_of_profile(setting: str, model_path: str) -> None:
    if is_profile(setting.strip()) and (remark := other_model(setting.strip(), model_path)):
        _terminal.note(remark)


def describe_pcd(config: PCDConfig | None) -> str:
    if config is None:
        return "off"
    if config == PCDConfig():
        return "on"
    return "cautious" if config == PCDConfig.cautious() else f"on ({config.describe()})"


def add_model(parser: argparse.ArgumentParser, **kwargs: Any) -> None:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=26)  # one line for each option
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or 'demo', which comes with pypcd", **kwargs)


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `low`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: an integer of at least {low}")
        return value

    return convert


def lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens such as 512,2k.

    Raises:
        ValueError: one of them is no integer of at least 16.
    """
    return tuple(_length(part) for part in text.split(","))


def _length(text: str) -> int:
    number = text.strip().lower()
    factor = 1024 if number.endswith("k") else 1
    try:
        value = int(number.rstrip("k")) * factor
    except ValueError:
        value = 0
    if value < 16:
        raise ValueError(f"--length has {text!r}; allowed: integers of at least 16, such as 512,2k")
    return value


class ListNames(argparse.Action):
    """An option that prints what names there are, and leaves."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        tasks = evaluation.TASKS
        for line in (
            f"tasks: {', '.join(name for name in tasks if not name.startswith('longbench-'))}",
            f"  from files or the Hugging Face hub: {', '.join(name for name in tasks if name.startswith('longbench-'))}",
            f"methods: {', '.join(methods.NAMES)}",
            "  joined by +, values behind colons, such as beam:4+pcd:beta=1.5 (docs/methods.md)",
        ):
            print("\n".join(textwrap.wrap(line, _terminal.width(), subsequent_indent="    ")))
        parser.exit()


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action=ListNames, nargs=0, help="print the names of tasks and methods, and leave")


def add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--threads", metavar="N", type=at_least(1), help="CPU threads")
    add("--gpu-layers", metavar="N", type=at_least(-1), help="layers on the GPU (default: all, where there is one)")


def machine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What add_machine() asked for, as arguments of pypcd.Llama."""
    options = {"n_threads": args.threads, "n_threads_batch": args.threads}
    if args.gpu_layers is not None:
        options["n_gpu_layers"] = args.gpu_layers
    return options


def job_options(args: argparse.Namespace) -> dict[str, Any]:
    """What add_machine() asked for, for each of --jobs processes."""
    options = machine_options(args)
    if args.jobs > 1 and args.threads is None:
        options["n_threads"] = options["n_threads_batch"] = max(1, (os.cpu_count() or 1) // args.jobs)
    return options


def default_task(model: str, of_others: str = "kv") -> str:
    """The demo model knows one form of identifiers only."""
    return "kv-short" if model == "demo" else of_others


def names(text: str | None) -> tuple[str, ...]:
    """The names in a list with commas."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of chat and generate."""
    add = parser.add_argument
    add("--pcd", metavar="SETTING", help="cautious (default), on (the paper's), off, or beta=1.5,window=64 ...")
    add("--temp", metavar="T", default="0", help="temperature; 0 (default): greedy, reproducible")
    add("--seed", metavar="N", help="for a temperature above 0 (default: random)")
    add("--max-tokens", metavar="N", default="1024", help="longest answer (1024); 0: until the context is full")
    add("--n-ctx", metavar="N", type=at_least(0), default=0, help="context (default: the model's, or what fits)")
    add_machine(parser)
    add("--verbose", action="store_true", help="llama.cpp's own log, on stderr")


def sampling_from(args: argparse.Namespace) -> Sampling:
    sampling = Sampling()
    for name, value in (("temperature", args.temp), ("seed", args.seed), ("max_tokens", args.max_tokens)):
        sampling.set(name, value)
    return sampling


def load_model(args: argparse.Namespace) -> pypcd.Llama:
    """The model, with PCD as asked for. By default PCD is on; a model that cannot run it goes on without, and says so.

    Raises:
        UnsupportedError: PCD was asked for by name, and cannot run.
    """
    config = pcd_setting(DEFAULT_PCD if args.pcd is None else args.pcd, args.model)  # complain before the slow part
    if args.verbose:
        logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    llm = open_model(args.model, n_ctx=args.n_ctx, verbose=args.verbose, **machine_options(args))
    refusal = llm.pcd_refusal(config)
    if refusal is None:
        llm.pcd = config
    elif args.pcd is not None:
        raise UnsupportedError(f"PCD cannot run here: {refusal}")
    else:
        _terminal.note(f"going on without PCD: {refusal}")
    return llm


def open_model(path: str, **options: Any) -> pypcd.Llama:
    """pypcd.Llama, with a progress bar where loading takes long."""
    bar = _terminal.progress(100, "loading", unit="%", enabled=not options.get("verbose"))
    with bar, _terminal.interruptible() as stopped:

        def loaded(done: float) -> bool:
            bar.update(int(100 * done) - bar.n)
            return not stopped()

        callback = _engine.progress_callback(loaded)

        class LoadingLlama(pypcd.Llama):
            # llama_cpp.Llama has no argument for the callback
            @property
            def model_params(self) -> Any:
                return self._model_params

            @model_params.setter
            def model_params(self, params: Any) -> None:
                setter: Any = pypcd.Llama.model_params
                setter.fset(self, params)
                params.progress_callback = callback

        try:
            llm = LoadingLlama(path, **options)
        except ModelError:
            if not stopped():
                raise
    if stopped():
        raise KeyboardInterrupt
    return llm
