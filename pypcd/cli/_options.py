"""Options that several subcommands share, and their meaning. Knows nothing of the library or of models in memory."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import textwrap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pypcd.cli import _terminal
from pypcd.errors import InputError, PCDError, did_you_mean
from pypcd.gguf import read_gguf, resolve_model
from pypcd.settings.config import RECOMMENDED, PCDConfig, Profile, load
from pypcd.settings.ranges import Integer, Number, literal
from pypcd.settings.remote import parse_servers

if TYPE_CHECKING:
    from pypcd import Llama
    from pypcd.decode import Edit, Method, Search
    from pypcd.evaluation import Cluster

_RANGES: dict[str, Number | Integer] = {
    "temperature": Number(0, 2, note="0: the most probable token; above 2 nearly all words are drawn at random"),
    "top_p": Number(0, 1),
    "top_k": Integer(0, note="0 keeps all tokens"),
    "min_p": Number(0, 1),
    "repeat_penalty": Number(0.5, 2, note="1 is none"),
    "max_tokens": Integer(0, note="0 goes on until the context is full"),
    "seed": Integer(0, 2**32 - 2, note="or 'random'"),
}


@dataclasses.dataclass
class GenerationSettings:
    """How the tokens of an answer are drawn. The temperature is 0: greedy, as in the paper, and the same again each time."""

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
            raise InputError(
                f"there is no setting {name!r}{did_you_mean(name, _RANGES)}; there are: {', '.join(_RANGES)}"
            )
        random_seed = name == "seed" and value in ("random", None)
        setattr(self, name, None if random_seed else _RANGES[name](name, literal(str(value))))
        return name

    def draw_seed(self) -> int:
        return random.randrange(2**32 - 1) if self.seed is None else self.seed

    def method(self, llm: Llama, seed: int, edit: Edit | None = None) -> Method:
        """What answers with these settings, under the PCD setting in force."""
        from pypcd.decode import PCD, Greedy, Method, Plain, Sampling

        search: Search = Greedy(self.repeat_penalty)
        if self.temperature > 0:
            search = Sampling(
                self.temperature, self.top_k, self.top_p, seed, min_p=self.min_p, repeat_penalty=self.repeat_penalty
            )
        return Method("chat", Plain() if llm.pcd is None else PCD(llm.pcd), search, edit)

    def describe(self) -> str:
        values = {**dataclasses.asdict(self), "seed": "random" if self.seed is None else self.seed}
        return "  ".join(f"{name}={value}" for name, value in values.items())


def pcd_setting(text: str, model: str) -> PCDConfig | None:
    """PCDConfig.resolve(), with a note if the setting is a profile of another model."""
    setting = load(text)
    config = PCDConfig.resolve(setting)
    note_of_profile(setting, resolve_model(model))
    return config


def note_of_profile(setting: object, model_path: str) -> None:
    """Print a note if the setting is a profile that was chosen with another model."""
    if isinstance(setting, Profile) and (remark := setting.remark(model_path)):
        _terminal.note(remark)


def note_of_demo(model: str, prompt: str) -> None:
    """Print a note if the included model is asked what it cannot answer."""
    if model == "demo" and "{" not in prompt:
        _terminal.note(
            "the model 'demo' looks values up in a JSON object and knows nothing else; pypcd demo prints a question"
        )


def note_of_template(model: str, chat: bool) -> None:
    """Print a note if questions do not go through a template that the model has, as they would in a chat."""
    if not chat and model != "demo" and "tokenizer.chat_template" in read_gguf(resolve_model(model)).metadata:
        _terminal.note("the model has a chat template; with --chat it is asked through that, as pypcd chat does")


def how_to_turn_on(option: str) -> str:
    """A sentence for those who did not choose a setting. `option`: what takes one, such as --pcd."""
    return f"PCD is off; {option} {RECOMMENDED} turns it on"


def add_model(
    parser: argparse.ArgumentParser, what: str = "a GGUF file; or 'demo', which only looks up values", **kwargs: Any
) -> None:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, max_help_position=26)  # one line for each option
    parser._optionals.title = "arguments"  # one list of all: help is to fit a screen
    parser._optionals.add_argument("model", metavar="MODEL", help=what, **kwargs)


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `low`."""
    kind = Integer(low)

    def convert(text: str) -> int:
        try:
            return kind("", literal(text))
        except ValueError as error:  # argparse names the option itself
            raise argparse.ArgumentTypeError(f"{text!r}; {str(error).rpartition('; ')[2]}") from None

    return convert


def lengths(text: str, option: str = "--length") -> tuple[int, ...]:
    """Numbers of tokens such as 512,2k, which is 2048.

    Raises:
        ValueError: one of them is out of range; the message has the option's name.
    """
    kind = Integer(16)

    def convert(part: str) -> int:
        number = part.strip().lower()
        try:
            value = Integer(0)("", literal(number.removesuffix("k")))
            return kind("", value * (1024 if number.endswith("k") else 1))
        except ValueError:
            raise InputError(f"{option} has {part!r}; allowed: {kind.allowed}, such as 512,2k") from None

    return tuple(map(convert, text.split(",")))


class ListNames(argparse.Action):
    """An option that prints the names of tasks and methods, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from pypcd import decode, evaluation  # slow to import, and only this option needs them

        tasks, groups = evaluation.TASKS, evaluation.GROUPS
        known = evaluation.tasks.parts_of(groups)
        for line in (
            f"tasks: {', '.join(name for name in tasks if name not in known)}",
            *(f"  {group}, which is all of: {', '.join(names)}" for group, names in groups.items()),
            f"methods: {', '.join(decode.names())}",
            "  join parts with +, write values after colons, such as replay:2+pcd:paper:beta=1.5 (docs/lab/methods.md)",
        ):
            print("\n".join(textwrap.wrap(line, _terminal.width(), subsequent_indent="    ", break_on_hyphens=False)))
        parser.exit()


def add_read(parser: argparse.ArgumentParser) -> None:
    """What pypcd.ask.read_of() reads."""
    parser.add_argument("--read", metavar="N", help="documents' tokens to read (default: all if it fits)")


def add_n_ctx(parser: argparse.ArgumentParser) -> None:
    what = "context (default: the model's, or what fits)"
    parser.add_argument("--n-ctx", metavar="N", type=at_least(0), default=0, help=what)


def check_room(llm: Llama, n_prompt: int) -> None:
    """
    Raises:
        PCDError: a prompt of so many tokens does not fit in the context.
    """
    if n_prompt >= llm.n_ctx():
        raise PCDError(
            f"{n_prompt} tokens do not fit in the context of {llm.n_ctx()}; give a larger --n-ctx, a shorter text or, with documents, a smaller --read"
        )


def add_list(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action=ListNames, nargs=0, help="print the names of tasks and methods, and exit")


def add_machine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--threads", metavar="N", type=at_least(1), help="CPU threads")
    add("--gpu-layers", metavar="N", type=at_least(-1), help="layers on the GPU (default: all, if there is one)")
    add_rpc(parser)


def add_rpc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rpc", metavar="HOST:PORT", help="other machines' 'pypcd rpc-server', with commas")


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Where questions are answered; see jobs()."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--jobs", metavar="N", type=at_least(1), default=1, help="processes (default %(default)s)")
    group.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler; docs/evaluate.md")


@contextlib.contextmanager
def jobs(args: argparse.Namespace) -> Iterator[int | Cluster]:
    """A block with the place that add_jobs()'s options name, for evaluate() and the like."""
    if args.cluster is None:
        yield args.jobs
        return
    from pypcd.evaluation import Cluster  # slow to import, for the commands that have no such options

    with Cluster(args.cluster) as cluster:
        yield cluster


def machine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of add_machine()'s options, as arguments of pypcd.Llama."""
    options = {"n_threads": args.threads, "n_threads_batch": args.threads}
    if args.gpu_layers is not None:
        options["n_gpu_layers"] = args.gpu_layers
        from pypcd.llama import machine  # slow to import, and few use this option

        if args.gpu_layers and args.rpc is None and not machine.has_gpu():
            _terminal.note(
                f"--gpu-layers is {args.gpu_layers}, but no GPU is found (docs/install.md); the CPU computes all"
            )
    if args.rpc is not None:
        options["rpc_servers"] = ",".join(parse_servers(args.rpc))  # text: it stands in the record of a run
    return options


def default_task(model: str, of_others: str = "kv") -> str:
    """The default task of a command; the demo model was trained only on kv-short."""
    return "kv-short" if model == "demo" else of_others


def names(text: str | None) -> tuple[str, ...]:
    """The names in a comma-separated list."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def add_common(parser: argparse.ArgumentParser) -> None:
    """The options of chat and generate."""
    add = parser.add_argument
    add("--pcd", metavar="SETTING", help="off (default), unsure, window:relative_top=0.1 ...")
    add("--temp", metavar="T", help="temperature; 0 (default): greedy")
    add("--seed", metavar="N", help="for a temperature above 0 (default: random)")
    add("--top-p", metavar="P", help="and --top-k, --min-p, --repeat-penalty, as llama.cpp")
    for name in ("--top-k", "--min-p", "--repeat-penalty"):
        add(name, metavar="X", help=argparse.SUPPRESS)
    add("--max-tokens", metavar="N", help="longest answer (1024); 0: until the context is full")
    add_n_ctx(parser)
    add_machine(parser)
    add("--verbose", action="store_true", help="llama.cpp's own log, on stderr")


def sampling_from(args: argparse.Namespace) -> GenerationSettings:
    sampling = GenerationSettings()
    for name in ("temp", *_RANGES):
        if (value := vars(args).get(name)) is not None:
            sampling.set(name, value)
    return sampling
