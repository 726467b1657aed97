"""`pypcd` as a model of lm-evaluation-harness: `python -m pypcd.integrations.lm_eval --model pypcd --model_args path=model.gguf,pcd=unsure`.

The only module that imports lm_eval, and imported by it alone: newer versions find it by its entry point in pyproject.toml,
those before by `pypcd.integrations.lm_eval`. It turns the harness's requests into tokens; `texts` does the rest. It does not know tasks
or metrics.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pypcd
from pypcd import engine  # first: it reports a wrong or missing library

# isort: split
import jinja2
import llama_cpp
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found, import-untyped, unused-ignore]
from lm_eval.models.utils import normalize_gen_kwargs  # type: ignore[import-not-found, import-untyped, unused-ignore]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-not-found, import-untyped, unused-ignore]
from tqdm import tqdm

from pypcd.decode import Sampling
from pypcd.errors import ArgumentError, InputError, PCDError, did_you_mean
from pypcd.integrations.texts import Choose, Texts
from pypcd.llama import Llama
from pypcd.prompt import chat_formatter, has_template
from pypcd.settings.ranges import Integer

__all__ = ["HarnessModel"]

logger = logging.getLogger(__name__)

_AUTO = 16  # texts at once
# arguments of pypcd.Llama that are the harness's, that would change what a score is, or that nothing here looks at; without
# swa_full sliding-window layers forget what a common beginning needs
_OURS = (
    *("model_path", "n_seq_max", "logits_all", "embedding", "pooling_type", "vocab_only", "draft_model", "swa_full"),
    *("chat_format", "chat_handler", "tokenizer", "spm_infill"),
)
_NAMES = (
    "path",
    "add_bos_token",
    *(
        name
        for of in (Llama, llama_cpp.Llama)
        for name, p in inspect.signature(of.__init__).parameters.items()
        if name not in ("self", *_OURS) and p.kind is not p.VAR_KEYWORD and p.kind is not p.VAR_POSITIONAL
    ),
)
_SAMPLING = ("temperature", "top_k", "top_p", "seed")
_GENERATION = ("until", "max_gen_toks", "do_sample", *_SAMPLING)


class HarnessModel(TemplateLM):
    """A GGUF model for lm-evaluation-harness, with PCD or without.

    Generation is pypcd.Llama's. Given texts (loglikelihood, multiple choice, perplexity) are scored by the same contrast
    without its cut: log-softmax((1 + beta) L - beta L*) over all tokens, where PCD contrasts, and log-softmax(L) where it
    does not (pcd=off, min_context, min_entropy, min_first_entropy). `is_greedy` says whether generation, which has the cut,
    would write the text. A context is the prompt, what follows it the answer.

    Args:
        path: a GGUF file, or "demo".
        pcd: the setting, as pypcd.Llama takes it; off unless it is given.
        add_bos_token: whether texts begin with the model's token for that (BOS); None: as its file says.
        batch_size: how many texts are evaluated at once; "auto" is 16, at most max_batch_size. They share n_ctx, and as many
            are taken as fit.
        device: "cpu" is n_gpu_layers=0. All else, such as the harness's own default "cuda:0", leaves it to pypcd.Llama,
            which takes the GPU if the library has one.
        **kwargs: other arguments of pypcd.Llama, such as n_ctx, n_threads and n_gpu_layers.

    Raises:
        FileNotFoundError, ModelError, UnsupportedError, ValueError: as pypcd.Llama.
        TypeError: there is no path, or an argument is unknown; the message names the nearest.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        pcd: Any = False,
        *,
        add_bos_token: bool | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name in kwargs:
            if name not in _NAMES:
                near = did_you_mean(name, _NAMES)
                raise ArgumentError(
                    f"model_args has {name!r}, which is unknown{near}; allowed: {', '.join(sorted(_NAMES))}"
                )
        if path is None:
            raise ArgumentError("model_args has no path; write --model_args path=model.gguf")
        if device == "cpu":
            kwargs["n_gpu_layers"] = 0
        self.batch_size = _batch_size(batch_size, max_batch_size)
        n_seq_max = self.batch_size + (self.batch_size > 1)
        self.llm = Llama(path, pcd=pcd, n_seq_max=n_seq_max, **kwargs)
        if engine.is_recurrent(self.llm):
            self.batch_size = 1  # its state is that of one sequence
        self.pcd = self.llm.pcd
        self.texts = Texts(self.llm, self.batch_size, self.pcd)
        bos = self.llm.token_bos()
        by_file = self.llm.tokenize(b"a", add_bos=True)[:1] == [bos]
        self._bos = [bos] if (by_file if add_bos_token is None else add_bos_token) else []

    # -- tokens ------------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.llm.token_eos()

    @property
    def prefix_token_id(self) -> int:
        """What stands in for an empty context: BOS, or EOS where the file names none."""
        return self.llm.token_bos() if "tokenizer.ggml.bos_token_id" in self.llm.metadata else self.llm.token_eos()

    @property
    def max_length(self) -> int:
        return self.llm.n_ctx()

    @property
    def max_gen_toks(self) -> int:
        """The length of an answer where a task names none."""
        return 256

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The tokens of a text, special ones too, since chat templates write them as text."""
        tokens = list(self.llm.tokenize(string.encode("utf-8", "replace"), add_bos=False, special=True))
        bos = self._bos if add_special_tokens is None else [self.llm.token_bos()] * bool(add_special_tokens)
        return tokens if tokens[:1] == bos else bos + tokens

    def tok_decode(self, tokens: Iterable[int], **kwargs: Any) -> str:
        return b"".join(engine.token_bytes(self.llm, token) for token in tokens).decode("utf-8", "replace")

    # -- what the harness asks -----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = []
        for texts, context, continuation in requests:
            if not continuation:
                raise InputError(f"a request has no text to be scored: {texts!r}; allowed: at least one token")
            if len(continuation) > self.max_length:
                raise InputError(
                    f"a text to be scored has {len(continuation)} tokens; allowed: at most n_ctx, {self.max_length}; "
                    "load the model with a larger n_ctx"
                )
            context = list(context) or [self.prefix_token_id]
            n = self.max_length + 1 - len(continuation)
            pairs.append((context[-n:], list(continuation)))
        self._note_cut(sum(len(kept) < len(whole) for (kept, _), (_, whole, _) in zip(pairs, requests)), len(pairs))
        found: dict[int, tuple[float, bool]] = {}
        done = tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests")
        with done:
            for i, log_probability, is_greedy in self.texts.score(pairs):
                found[i] = log_probability, is_greedy
                if requests[i][0] is not None:  # a window of a longer text is no request
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                done.update()
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, in windows of n_ctx; each window counts as one answer (min_first_entropy)."""
        if self.pcd is not None and (self.pcd.min_first_entropy or self.pcd.min_context):
            logger.warning(
                "PCD (%s) decides by where an answer begins, and a whole text has none: each window of %d tokens counts as "
                "one answer",
                self.pcd.describe(),
                self.max_length,
            )
        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            new = [(None, *make_disjoint_window(pair)) for pair in rolling]
            windows += new
            counts.append(len(new))
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        totals = [sum(next(scores)[0] for _ in range(n)) for n in counts]
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: dict[int, str] = {}
        done = tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests")
        with done:
            for wanted, members in _alike([request.args[1] for request in requests]):
                for i, text in self._generated([requests[i].args[0] for i in members], wanted):
                    found[members[i]] = text
                    self.cache_hook.add_partial("generate_until", requests[members[i]].args, text)
                    done.update()
        return [found[i] for i in range(len(requests))]

    def _generated(self, contexts: Sequence[str], wanted: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
        kwargs = dict(normalize_gen_kwargs(dict(wanted), self.max_gen_toks))
        for name in kwargs:
            if name not in _GENERATION:
                near = did_you_mean(name, _GENERATION)
                raise InputError(f"gen_kwargs has {name!r}, which is unknown{near}; allowed: {', '.join(_GENERATION)}")
        max_tokens = Integer(1, self.max_length - 1)("max_gen_toks", kwargs["max_gen_toks"])
        sampling = {name: kwargs[name] for name in _SAMPLING if kwargs.get(name) is not None}
        drawn: dict[str, int] = {}
        nth = [drawn.update({text: drawn.get(text, -1) + 1}) or drawn[text] for text in contexts]  # repeats differ

        def chooser(i: int) -> Choose:
            values = {"top_k": 0, "top_p": 1.0, **sampling, "seed": sampling.get("seed", 0) + nth[i]}
            return Sampling(**values).chooser(contexts[i].encode("utf-8", "replace"))

        stops = [stop for stop in kwargs["until"] if stop]
        encoded = [self.tok_encode(stop, add_special_tokens=False) for stop in stops]
        ends = [ids[0] for ids in encoded if len(ids) == 1 and not engine.token_bytes(self.llm, ids[0])]
        tokens = [self.tok_encode(text) or [self.prefix_token_id] for text in contexts]
        prompts = [list(ids[-(self.max_length - max_tokens) :]) for ids in tokens]
        self._note_cut(sum(len(kept) < len(whole) for kept, whole in zip(prompts, tokens)), len(prompts))
        yield from self.texts.answers(
            prompts,
            max_tokens=max_tokens,
            stops=stops,
            ends=ends,
            chooser=chooser if kwargs["do_sample"] else None,
        )

    def _note_cut(self, n: int, of: int) -> None:
        if n:
            logger.warning(
                "%d of %d texts are longer than the context of %d tokens: the beginning of each is left out; load the model "
                "with a larger n_ctx",
                n,
                of,
                self.max_length,
            )

    # -- chat --------------------------------------------------------------------------------------------------------------

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, ready for its next answer; or for the rest of its last message."""
        if not has_template(self.llm):
            raise PCDError("this model has no chat template; leave out --apply_chat_template")
        begun = "" if add_generation_prompt else chat_history[-1]["content"]
        messages = chat_history if add_generation_prompt else chat_history[:-1]
        make = chat_formatter(self.llm)
        without = [message for message in messages if message["role"] != "system"]
        for kept in (messages, without):
            try:
                return str(make(messages=kept).prompt) + begun
            except (jinja2.TemplateError, ValueError) as error:
                if len(kept) == len(without):
                    raise PCDError(f"the model's chat template rejects these messages: {error}") from error
                logger.warning("the model's chat template rejects system messages: they are left out")
        raise AssertionError("unreachable")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if isinstance(chat_template, str):
            raise InputError(
                f"apply_chat_template is {chat_template!r}; allowed: no name, since a model file has one template; write "
                "--apply_chat_template alone"
            )
        return self.llm.metadata.get("tokenizer.chat_template", "") if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """What prompts made by --cache_requests depend on: the chat template, and the tokens that are written in it."""
        template = self.llm.metadata.get("tokenizer.chat_template", "")
        made = hashlib.sha256(repr((template, self.llm.token_bos(), self.llm.token_eos())).encode()).hexdigest()
        return f"pypcd__{os.path.basename(self.llm.model_path)}__{made[:12]}"

    # -- records -----------------------------------------------------------------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """What belongs to a result: the model, the setting, and the context."""
        return {
            "model_path": self.llm.model_path,
            "model_bytes": os.path.getsize(self.llm.model_path),
            "model_num_parameters": engine.n_parameters(self.llm),
            "pcd": "off" if self.pcd is None else self.pcd.describe(),
            "n_ctx": self.max_length,
            "add_bos_token": bool(self._bos),
            "pypcd_version": pypcd.__version__,
        }


def _batch_size(value: int | str, most: int | None) -> int:
    """How many texts at once: a number, or "auto", which may have further words ("auto:4")."""
    if isinstance(value, str):
        if value.split(":")[0] == "auto":
            return min(_AUTO, most or _AUTO)
        if not value.isdecimal():
            raise InputError(
                f"batch_size is {value!r}; allowed: auto, or an integer from 1 to {engine.N_SEQUENCES - 1}"
            )
        value = int(value)
    return Integer(1, engine.N_SEQUENCES - 1)("batch_size", value)


def _alike(items: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], list[int]]]:
    """Equal items with their places."""
    groups: dict[str, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(repr(sorted(item.items())), []).append(i)
    for members in groups.values():
        yield items[members[0]], members
