"""pypcd.Llama: a llama_cpp.Llama whose logits are contrasted."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from pypcd import engine as lib  # first: it reports a wrong or missing library

# isort: split
import llama_cpp
import numpy as np
from typing_extensions import Self

from pypcd.engine import PCDAnswer, PCDLogits, PCDStats
from pypcd.errors import ArgumentError, InputError, ModelError, PCDError, UnsupportedError, rename
from pypcd.gguf import explained, resolve_model
from pypcd.llama import arguments, lock, machine, saved_state, templates, threads
from pypcd.settings.config import PCDConfig, PCDSetting, Profile, load
from pypcd.settings.ranges import Integer
from pypcd.settings.remote import Servers, parse_servers

if TYPE_CHECKING:
    from llama_cpp.llama_speculative import LlamaDraftModel
    from llama_cpp.llama_types import (
        ChatCompletionRequestMessage,
        CreateChatCompletionResponse,
        CreateChatCompletionStreamResponse,
        CreateCompletionResponse,
    )
    from typing_extensions import Unpack

    from pypcd.ask import Answer, Documents
    from pypcd.ask import Options as AskOptions

__all__ = ["Llama"]

_T = TypeVar("_T")
_OPENING = threading.Lock()  # llama_cpp redirects the process's output meanwhile: two at once would lose it

LEFT_PLAIN = (
    "PCD is off in answers under a grammar, a JSON schema or a forced tool, where a contrast spoils values; pcd= in the call "
    "itself turns it on (docs/settings.md, Structured output)"
)


def _with_the_type_of(other: _T) -> Callable[[Any], _T]:
    """A decorator: a function has the type of another one."""
    return lambda function: function


@lock.guarded
class Llama(llama_cpp.Llama):
    """A llama_cpp.Llama with Positional Contrastive Decoding (PCD).

    While PCD is on, every way of evaluating tokens gives contrasted logits: completion, chat, generate, eval, and any
    call of llama_decode on this context.

    Args:
        model_path: a GGUF file, or "demo" for the small model that comes with pypcd.
        pcd: True for the preset "unsure", text such as "unsure", "paper:beta=1.5" or a profile's file (.json), a
            mapping of changed fields, a PCDConfig, or False. Answers under a grammar, a JSON schema or a forced tool are plain
            all the same, unless their own call has `pcd`.
        engine: what evaluates the second time. "native": pypcd's own libllama, which runs all settings but cache="separate". "stock": any
            libllama, for settings with a window alone (perturbation="none"), such as "unsure", and over-rotation. None: the native one
            if this process has it and it runs `pcd`.
        n_seq_max: how many sequences the caller's own batches may have, decoded through `llm.ctx`; 1 to 192, at most
            n_batch. They share n_ctx.
        use_extra_bufts: whether weights may be repacked for the CPU's matrix kernels; None: yes, for those of AMX if a
            probe has found that they work (some compilers break them; docs/troubleshooting.md, AMX is off).
        rpc_servers: other machines that compute, each a `pypcd rpc-server`: "host:port,host:port" or a sequence. Layers,
            caches and second keys are spread over their devices, in this order, and then this machine's GPUs. Each serves
            one process at a time. ggml ends this process if one is lost later.
        n_ctx: how many tokens fit in the context; None or 0: the model's own context, or what fits in a quarter of memory, or
            in three quarters of what the weights leave of the GPU's (llama_cpp's default is 512). It is rounded up to a multiple of 256.
        n_gpu_layers: how many layers are on a GPU; -1: all; None: -1 if the library has a GPU or there are servers, else 0
            (llama_cpp's default is 0).
        flash_attn: whether to use flash attention; None: with a GPU or servers, in each case the faster one (llama_cpp's
            default is False).
        n_threads: how many threads decode; None: the number of cores up to four, above that half of them (llama_cpp's
            default is half of them), or as many as other programs leave, which is looked up at each prompt (on Linux); but not
            with flash attention, where the logits depend on it.
        n_threads_batch: how many threads read prompts; None: n_threads if that is given, else the number of cores, or as many as
            other programs leave.
        verbose: whether llama.cpp's log is printed (llama_cpp's default is True).
        draft_model: proposes tokens that are evaluated ahead, as llama_cpp.Llama does it, while PCD is off. Beside it PCD is an
            UnsupportedError.
        progress: called after each batch of a prompt of more than one, with the number of tokens that are evaluated and that of all
            that have to be; what it raises stops the evaluation there.
        **kwargs: the other arguments of llama_cpp.Llama.

    Raises:
        FileNotFoundError: there is no such file.
        ModelError: the file is not a GGUF, is damaged, or does not fit in memory.
        UnsupportedError: this model cannot run the requested PCD setting; the message says why and what works.
        RPCError: a server cannot be reached, is no such server, has another version, or serves another process.
        LibraryError: there are servers, but neither pypcd nor llama-cpp-python was built with ggml's RPC; or the native engine is asked
            for, and this process has another libllama.
        TypeError: an unknown keyword argument; the message names the nearest.
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        pcd: PCDSetting = False,
        engine: Literal["native", "stock"] | None = None,
        n_seq_max: int = 1,
        use_extra_bufts: bool | None = None,
        rpc_servers: Servers = None,
        n_ctx: int | None = None,
        n_gpu_layers: int | None = None,
        flash_attn: bool | None = None,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        verbose: bool = False,
        draft_model: LlamaDraftModel | None = None,
        progress: Callable[[int, int], object] | None = None,
        **kwargs: Any,
    ) -> None:
        opening: dict[str, Any] = {**kwargs}
        arguments.check_keywords(opening)
        if progress is not None and not callable(progress):
            raise ArgumentError(f"progress is {progress!r}; allowed: a function of two numbers of tokens, or None")
        self.progress = progress
        self._lock = lock.ModelLock(self)
        # the setting
        self._pcd: PCDConfig | None = None
        self._combines = True  # False once a sampler does the contrast
        self._call_has_pcd = False  # the setting in force is that of the call itself
        # the cache and its rows
        self._n_changes = 0  # of the cache, by eval() and load_state()
        self._held: Any = None  # what a session of pypcd.decode has evaluated
        self._open: Any = None  # the session whose answer is not finished
        self._is_prompt = False  # the next evaluation is that of generate()'s prompt
        self._is_restored = False  # by load_state: then there are no logits of the last token
        # logits processors, grammars
        self._processors: lock.Processors | None = None  # those of the sampler
        self._n_constrained = 0  # answers left plain under a grammar
        self._answer = PCDAnswer()
        self.model_path = path = resolve_model(model_path)
        self.draft_model = draft_model
        config = self._resolve(pcd)
        self._n_seq_max = Integer(1, lib.N_SEQUENCES)("n_seq_max", n_seq_max)
        self._rpc_servers, servers = rpc_servers, parse_servers(rpc_servers)
        self._engine = lib.choose_engine(engine, config)
        # from the beginning; a context that has a LoRA is not opened again for them
        self._shows_operations = bool(opening.get("lora_path")) or lib.sees_operations(config)
        lib.clear_errors()

        self._use_extra_bufts = use_extra_bufts  # as given
        self._extra_bufts = lib.choose_extra_bufts(use_extra_bufts)

        self._remote = lib.RemoteDevices(servers) if servers else None
        remote = self._remote.devices if self._remote else []
        gpu = machine.has_gpu({"rpc_servers": servers})
        if n_gpu_layers is None:
            n_gpu_layers = -1 if gpu else 0
        if flash_attn is None:
            flash_attn = gpu and n_gpu_layers != 0
        opening.update(verbose=verbose, n_gpu_layers=n_gpu_layers, flash_attn=flash_attn, n_ctx=n_ctx)
        opening["n_ctx"] = machine.checked_n_ctx(path, opening, remote=remote)
        self._n_threads = n_threads, n_threads_batch  # as given
        self._computing = {**opening, "rpc_servers": servers}
        self._threads = threads.choose(self._computing, *self._n_threads)
        opening["n_threads"], opening["n_threads_batch"] = self._threads.decode, self._threads.batch

        arguments.check_opening(path, opening, self._n_seq_max)
        try:
            try:
                with _OPENING:
                    super().__init__(path, draft_model=draft_model, **opening)
            except PCDError:
                raise
            except (ValueError, RuntimeError) as error:
                raise ModelError(f"cannot load {path}: {explained(lib.last_errors() or str(error))}") from error
            lib.guard_handles(self, lib.open_stock(self, self._n_seq_max) if self._engine == "stock" else None)
            # a draft model turns it on, though `scores` has rows for n_batch tokens alone then
            self._logits_all = bool(opening.get("logits_all"))
            # generate() writes a drafted text's next token down before eval() can say that it does not fit
            self.input_ids = np.zeros(self.n_ctx() + 1, dtype=np.intc)
            self._fingerprint = saved_state.fingerprint(path)
            # what tells these files from others, also before they were changed: 16 hexadecimal digits
            self.weights_id = saved_state.weights_id(path)
            self.lora_id = saved_state.weights_id(self.lora_path) if self.lora_path else ""
            self._keeps_state = lib.is_recurrent(self)
            self._apply(config)
            self._warn_beyond_training(opening)
        except BaseException:
            self.close()  # a traceback may keep this object alive for long
            raise

    # llama_cpp.Llama makes these structures and uses them at once; fields it has no argument for are set here

    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        if self._extra_bufts is not None:
            params.use_extra_bufts = self._extra_bufts
        if self._remote is not None:
            self._remote.give_to(self, params)
        self._model_params = params

    @property
    def context_params(self) -> Any:
        # embedding=True asks for all sequence ids there are, but some are for twins (the second evaluations of PCD)
        params = self._context_params
        if self._engine == "stock" and not params.embeddings:
            params.n_seq_max = self._n_seq_max + lib.n_twins(
                self._n_seq_max, min(params.n_batch, params.n_ctx or params.n_batch)
            )
        else:
            params.n_seq_max = max(self._n_seq_max, min(params.n_seq_max, lib.N_SEQUENCES))
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.kv_unified = True  # twins are further sequences in the same cells of the KV cache
        if self._engine == "stock" and self._shows_operations:
            params.cb_eval = lib.eval_callback(self)
        self._context_params = params

    @property
    def metadata(self) -> dict[str, str]:
        return self._metadata

    @metadata.setter
    def metadata(self, found: dict[str, str]) -> None:
        self._metadata = templates.readable(found)

    # -- the setting -----------------------------------------------------------------------------------------------

    @property
    def pcd(self) -> PCDConfig | None:
        """The PCD setting in force, None while it is off. Assign anything that the `pcd` argument takes.

        A mapping changes the setting in force; all else is a whole setting. The second keys (see
        PCDConfig.cache) stay while PCD is off, so that switching costs nothing; a setting that needs none frees them.
        A change holds whole or not at all: after an exception the former setting is in force.
        """
        return self._pcd

    @pcd.setter
    def pcd(self, setting: PCDSetting) -> None:
        self._apply(self._resolve(setting))
        if self._pcd is not None:
            lib.pcd(self).trim()

    def _resolve(self, setting: PCDSetting) -> PCDConfig | None:
        """The setting that a caller means. All that begins with an underscore takes what this returns; None is off there."""
        setting = load(setting)
        if isinstance(setting, Profile) and (text := setting.remark(self.model_path)):
            lib.logger.warning("%s", text)
        return self._checked(PCDConfig.resolve(setting, self._pcd))

    def _checked(self, config: PCDConfig | None) -> PCDConfig | None:
        """
        Raises:
            UnsupportedError: PCD is on, and there is a draft model.
        """
        if config is not None and self.draft_model is not None:
            raise UnsupportedError(
                f"PCD ({config.describe()}) cannot run here: there is a draft model, whose tokens are not contrasted; set "
                "draft_model to None, or leave PCD off"
            )
        return config

    def _warn_beyond_training(self, opening: Mapping[str, Any]) -> None:
        trained = lib.n_ctx_train(self)
        is_stretched = any(opening.get(name) for name in ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"))
        is_stretched |= opening.get("rope_scaling_type", -1) != -1
        most = -(-trained // 256) * 256 * self._n_seq_max  # several texts share a context
        if 0 < most < self.n_ctx() and not is_stretched:
            lib.logger.warning(
                "the context has %d tokens, but the model was trained for %d: answers to longer texts may be nonsense",
                self.n_ctx(),
                trained,
            )

    def __repr__(self) -> str:
        if not lib.is_open(self):
            return f"<pypcd.Llama {self.model_path}, closed>"
        setting = self.pcd.describe() if self.pcd else "off"
        return f"<pypcd.Llama {self.model_path}, n_ctx={self.n_ctx()}, pcd={setting}>"

    def check_pcd(self, setting: PCDSetting = True) -> None:
        """Check that this model and context can run a setting. The setting in force stays.

        Whether there is memory for another one shows when it is assigned.

        Raises:
            UnsupportedError: they cannot; the message says why and what works.
            ValueError, TypeError, FileNotFoundError: it is not a setting.
        """
        config = self._resolve(setting)
        refusal = lib.pcd_refusal(self, config)
        if config is not None and refusal is not None:
            raise UnsupportedError(f"PCD ({config.describe()}) cannot run here: {refusal}")

    def _apply(self, config: PCDConfig | None, combine: bool = True) -> None:
        """Put a setting in force; combine=False leaves the contrast to a sampler."""
        if (config, combine) == (self._pcd, self._combines):
            return
        disabled = lib.pcd(self).set(config, combine)
        self._pcd, self._combines = None if disabled else config, combine
        self._requires_eval = True  # the present logits were made under the old setting
        if disabled:
            lib.logger.warning("PCD stays off: %s", disabled)

    @contextlib.contextmanager
    def _pcd_set_to(self, config: PCDConfig | None) -> Iterator[None]:
        """A block under this setting. Second keys stay."""
        before, was_asked = (self._pcd, self._combines), self._call_has_pcd
        self._apply(config)
        self._call_has_pcd = True
        try:
            yield
        finally:
            self._call_has_pcd = was_asked
            if lib.is_open(self):
                self._apply(*before)

    # -- generation ------------------------------------------------------------------------------------------------

    @overload  # type: ignore[override]  # llama_cpp.Llama's have no overloads
    def create_completion(
        self,
        prompt: str | list[int],
        *,
        stream: Literal[False] = False,
        pcd: PCDSetting = None,
        **kwargs: Any,
    ) -> CreateCompletionResponse: ...
    @overload
    def create_completion(
        self,
        prompt: str | list[int],
        *,
        stream: Literal[True],
        pcd: PCDSetting = None,
        **kwargs: Any,
    ) -> Iterator[CreateCompletionResponse]: ...
    @overload
    def create_completion(
        self, prompt: str | list[int], *, stream: bool, pcd: PCDSetting = None, **kwargs: Any
    ) -> CreateCompletionResponse | Iterator[CreateCompletionResponse]: ...
    def create_completion(self, *args: Any, pcd: PCDSetting = None, **kwargs: Any) -> Any:
        """llama_cpp.Llama.create_completion, with a PCD setting of its own if one is given; calling the object does the same.

        Args:
            pcd: for this call and its stream alone, anything that the `pcd` of Llama takes; None: `llm.pcd`, but off under a grammar.
        """
        return self._call(pcd, super().create_completion, *args, **kwargs)

    @_with_the_type_of(create_completion)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """create_completion()."""
        return self.create_completion(*args, **kwargs)

    @overload  # type: ignore[override]
    def create_chat_completion(
        self,
        messages: list[ChatCompletionRequestMessage],
        *,
        stream: Literal[False] = False,
        pcd: PCDSetting = None,
        **kwargs: Any,
    ) -> CreateChatCompletionResponse: ...
    @overload
    def create_chat_completion(
        self,
        messages: list[ChatCompletionRequestMessage],
        *,
        stream: Literal[True],
        pcd: PCDSetting = None,
        **kwargs: Any,
    ) -> Iterator[CreateChatCompletionStreamResponse]: ...
    @overload
    def create_chat_completion(
        self,
        messages: list[ChatCompletionRequestMessage],
        *,
        stream: bool,
        pcd: PCDSetting = None,
        **kwargs: Any,
    ) -> CreateChatCompletionResponse | Iterator[CreateChatCompletionStreamResponse]: ...
    def create_chat_completion(self, *args: Any, pcd: PCDSetting = None, **kwargs: Any) -> Any:
        """llama_cpp.Llama.create_chat_completion, with a PCD setting of its own if one is given."""
        return self._call(pcd, super().create_chat_completion, *args, **kwargs)

    def _call(self, setting: PCDSetting, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs) under a setting, which also applies while a returned stream is read."""
        if "response_format" in kwargs:
            kwargs["response_format"] = arguments.response_format(kwargs["response_format"])
        if setting is None:
            return function(*args, **kwargs)
        config = self._resolve(setting)
        with self._pcd_set_to(config):
            result = function(*args, **kwargs)
        return self._steps(config, result) if isinstance(result, Iterator) else result

    def _steps(self, config: PCDConfig | None, iterator: Iterator[_T]) -> Generator[_T, Any, None]:
        """The same iterator, with every step run under a setting, and nothing between the steps."""
        return lock.steps(self._lock, iterator, lambda: self._pcd_set_to(config))

    def generate(  # type: ignore[override]
        self, tokens: Sequence[int], *args: Any, pcd: PCDSetting = None, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """llama_cpp.Llama.generate, with a PCD setting of its own if one is given.

        Raises:
            PCDError: a pcd_sampler() does the contrast, so these tokens would be plain ones.
        """
        if pcd is None and self._pcd is not None and not self._combines:
            raise PCDError(
                "a pcd_sampler does the contrast in its own chain; assign llm.pcd again to generate with PCD"
            )
        self._checked(self._pcd)  # a draft model may have been assigned meanwhile
        is_asked = pcd is not None or self._call_has_pcd or self._pcd is None
        generate = super().generate
        # a JSON schema and a forced tool are a grammar by now; a constraint that is a logits processor looks like any other processor
        grammar = inspect.signature(generate).bind(tokens, *args, **kwargs).arguments.get("grammar")
        is_left_plain = grammar is not None and not is_asked
        text = self._text_of(generate(tokens, *args, **kwargs), is_left_plain)
        return text if pcd is None and not is_left_plain else self._steps(self._resolve(pcd), text)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """llama_cpp.Llama.tokenize, also of texts with many letters, digits, signs or spaces in a row, at which llama.cpp ends the process.

        Raises:
            ValueError: there are more than a million bytes in a row.
        """
        return lib.with_stack(self, text, lambda: super(Llama, self).tokenize(text, add_bos, special))

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens. Of a long prompt, only the last batch's logits can be read, so only that batch gets a twin. With PCD generate()
        has the last token of a prompt evaluated alone, as it is if the prompt is asked again and all others are in the cache: a contrast
        multiplies the rounding that differs between batches of different sizes.

        Raises:
            ValueError: they do not fit in the context; nothing is evaluated.
            PCDError: llama_decode failed; the message has its reason.
            UnsupportedError: the model has an encoder, or keeps no keys.
        """
        lib.check_decoder(self)
        tokens = list(tokens)
        self._n_changes += 1
        if self.n_tokens + len(tokens) > self.n_ctx():
            raise InputError(
                f"{len(tokens)} more tokens after {self.n_tokens} exceed the context of {self.n_ctx()}; "
                "shorten the prompt or load the model with a larger n_ctx"
            )
        if not tokens:
            return
        if len(tokens) > 1:
            self._renew_threads()
        n_head = 0 if self._logits_all else (len(tokens) - 1) // self.n_batch * self.n_batch
        is_prompt, self._is_prompt = self._is_prompt and bool(self._lock.in_callback), False
        if self._pcd is not None:
            if is_prompt and not self._logits_all:
                n_head = len(tokens) - 1
            if is_prompt or not self.n_tokens or (self._logits_all and len(tokens) > 1):
                # the library sees no text before the answer if all rows of a prompt are asked for, or only one token is evaluated
                lib.pcd(self).begin_answer(self.n_tokens + len(tokens) - 1)
        progress = self.progress if len(tokens) > self.n_batch else None
        lib.clear_errors()
        try:
            for at in range(0, n_head, self.n_batch):
                with lib.pcd(self).suspended():
                    super().eval(tokens[at : min(at + self.n_batch, n_head)])
                if progress:
                    progress(min(at + self.n_batch, n_head), len(tokens))
            if self.draft_model is None or is_prompt or n_head or self._logits_all:
                super().eval(tokens[n_head:])
            else:
                self._eval_with_all_rows(tokens)
            if progress:
                progress(len(tokens), len(tokens))
        except PCDError:
            raise
        except RuntimeError as error:  # "llama_decode returned -1"; the cause went to the log
            raise PCDError(f"{error}: {lib.reason()}") from error
        self._is_restored = False

    def _eval_with_all_rows(self, tokens: list[int]) -> None:
        """llama_cpp.Llama.eval with a row for each drafted token, as with logits_all, but without a copy in `scores`."""
        lib.rewind(self, self.n_tokens)
        self._batch.set_batch(batch=tokens, n_past=self.n_tokens, logits_all=True)
        self._ctx.decode(self._batch)
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)
        self._requires_eval = False

    def ask(self, documents: Documents = (), question: str = "", **how: Unpack[AskOptions]) -> Answer:
        """Answer a question about documents: pypcd.ask.ask(), which says what the arguments are. pypcd.ask.stream() gives the answer piece
        by piece.

            answer = llm.ask("report.pdf", "Who signed it?")
            answer.text, answer.passages
        """
        from pypcd.ask import ask  # the one import that runs upwards: a door

        return ask(self, documents, question, **how)

    def save_state(self) -> llama_cpp.LlamaState:
        """llama_cpp.Llama.save_state, with a seal that tells this model's states from others', also after they were pickled."""
        state = super().save_state()
        vars(state)["seal"] = {"weights": self._fingerprint}
        return state

    def reset(self) -> None:
        """llama_cpp.Llama.reset; recurrent states are forgotten too."""
        if not self._keeps_state:
            super().reset()
            return
        self.n_tokens, self._requires_eval = 0, True
        for seq_id in range(self._n_seq_max):  # llama_cpp's clears the memory, which forgets them
            lib.rewind(self, 0, seq_id)

    def _renew_threads(self) -> None:
        """Other numbers of threads, where none were given and the machine has become busy, or idle."""
        best = threads.choose(self._computing, *self._n_threads)
        if best[:2] != self._threads[:2]:
            lib.set_threads(self, best.decode, best.batch)
            lib.logger.info("%d threads, %d for prompts; %s", *best)
            self.n_threads = self.context_params.n_threads = best.decode
            self.n_threads_batch = self.context_params.n_threads_batch = best.batch
        self._threads = best

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """llama_cpp.Llama.load_state.

        The state may be that of another object with another n_ctx or n_batch, if its tokens fit.

        Raises:
            ValueError: it is of another model, or longer than the context; nothing is changed.
            PCDError: llama.cpp cannot read it; then the context is empty.
        """
        state = saved_state.fitted(
            self.model_path, self._fingerprint, state, len(self.input_ids), self.n_ctx(), self.scores
        )
        self._n_changes += 1
        self._is_restored = True
        lib.clear_errors()
        try:
            super().load_state(state)
        except RuntimeError as error:
            lib.clear(self)
            raise PCDError(f"the state cannot be restored, and the context is empty now: {lib.reason()}") from error
        lib.pcd(self).set_tokens(self.input_ids[: self.n_tokens].tolist())

    def load_sequence(self, path: str | os.PathLike[str], tokens: Sequence[int]) -> None:
        """Replace what the context holds by a sequence from a file (prompt_cache); like load_state() it leaves no logits.

        Args:
            tokens: those that the sequence was made of.

        Raises:
            PCDError: llama.cpp cannot read it; then the context is empty.
        """
        _ = self.ctx  # a closed model says so
        lib.clear(self)
        self.n_tokens = 0
        self._n_changes += 1
        lib.load_sequence(self, os.fspath(path))
        self._is_restored = True
        self.input_ids[: len(tokens)] = tokens
        self.n_tokens, self._requires_eval = len(tokens), True
        lib.pcd(self).set_tokens(tokens)

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """llama_cpp.Llama.embed; embeddings have nothing to contrast."""
        self._n_changes += 1
        with self._pcd_set_to(None):
            return super().embed(*args, **kwargs)

    @property
    def engine(self) -> str:
        """What evaluates the second time: "native" or "stock"."""
        return self._engine

    @property
    def n_seq_max(self) -> int:
        """How many sequences batches may carry."""
        return self._n_seq_max

    # -- sampling --------------------------------------------------------------------------------------------------

    def sample(self, *args: Any, **kwargs: Any) -> int:  # type: ignore[override]
        """llama_cpp.Llama.sample.

        Raises:
            PCDError: there are no logits to sample from.
        """
        idx = kwargs.get("idx")
        at = -1 if idx is None else idx - self.n_tokens
        if self._is_restored or not (self.n_tokens and lib.has_row(self, at)):
            raise PCDError(
                f"there are no logits to sample from ({self.n_tokens} tokens, idx={idx}): evaluate tokens first, also after "
                "load_state(); of those, only the last one has some, unless logits_all=True"
            )
        before, sampler, processors = self._lock.in_callback, self._sampler, self._processors
        self._lock.in_callback = "sample"
        if before != "generate":
            self._sampler = None  # that of a text would be used in place of these arguments
        try:
            token = int(super().sample(*args, **kwargs))
            if self._processors is not None:
                self._processors.check()
            if before == "generate":
                self._note(token, at)
            return token
        finally:
            self._lock.in_callback, self._sampler, self._processors = before, sampler, processors

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        processors = kwargs.get("logits_processor")
        self._processors = None if processors is None else lock.Processors(processors)
        if kwargs.get("grammar") is not None:
            lib.check_grammar(self, kwargs["grammar"])
        kwargs["logits_processor"] = self._processors
        return super()._init_sampler(*args, **kwargs)

    def _text_of(self, tokens: Generator[_T, Any, None], is_left_plain: bool) -> Generator[_T, Any, None]:
        """The same generator, as the text of one answer that nobody else may change."""
        with self._lock:
            if is_left_plain:
                if not self._n_constrained:
                    lib.logger.warning("%s", LEFT_PLAIN)
                self._n_constrained += 1
            self._is_prompt, self._answer = True, PCDAnswer()
            if self._pcd is not None and self._pcd.min_first_entropy:
                self._requires_eval = True  # a cached prompt's logits may be those of an answer that began before
            guard = lock.StreamGuard(self)
        yield from lock.steps(self._lock, tokens, guard.step)

    def _note(self, token: int, at: int) -> None:
        """Count a token of the answer, sampled from row `at`, in last_answer."""
        if not self._answer.n_tokens:
            setting = self._pcd if self._combines else None
            self._answer = PCDAnswer(setting, n_prompt=self.n_tokens)
        rows = None if self._answer.setting is None else lib.pcd(self).logits(at)
        self._answer = self._answer.with_token(token, rows)

    # -- looking inside --------------------------------------------------------------------------------------------

    def pcd_logits(self, i: int = -1) -> PCDLogits:
        """The logits of the last evaluation, before and after the contrast, copied.

        Args:
            i: which token: its index in the batch, or negative, counted from the end of those whose logits were
                requested.

        Raises:
            PCDError: the last evaluation was without PCD, or there was none.
        """
        logits = lib.pcd(self).logits(i)
        if logits is None:
            raise PCDError(
                f"there are no PCD logits for row {i}: evaluate tokens first, with pcd=True; of a batch, only tokens whose logits were "
                "requested have them"
            )
        return logits.copy()

    @property
    def last_answer(self) -> PCDAnswer:
        """What PCD did to the answer that generate() wrote last, or has written so far: `str(llm.last_answer)` is a sentence."""
        return self._answer

    def pcd_stats(self) -> PCDStats:
        """What PCD has done in this context so far."""
        return dataclasses.replace(lib.pcd(self).stats(), n_constrained=self._n_constrained)

    # -- life ------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, repo_id: str, filename: str | None, *args: Any, **kwargs: Any
    ) -> Self:
        """Opens a model file of the Hugging Face Hub, which is downloaded if need be; the package huggingface-hub has to be installed."""
        return super().from_pretrained(repo_id, filename, *args, **kwargs)  # type: ignore[return-value]  # it calls cls()

    def close(self) -> None:
        """Free the model. What needs it raises PCDError from then on; a second close() does nothing.

        Raises:
            PCDError: a call is under way, in another thread or around this one.
        """
        if hasattr(self, "_stack"):  # missing if __init__ raised early
            with self._lock if lib.is_open(self) else contextlib.nullcontext():
                super().close()
                lib.invalidate_handles(self)

    def __enter__(self) -> Self:
        _ = self.ctx  # a closed one says so
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "n_threads": self._n_threads[0],
            "n_threads_batch": self._n_threads[1],
            "pcd": self._pcd,
            "engine": self._engine,
            "n_seq_max": self._n_seq_max,
            "use_extra_bufts": self._use_extra_bufts,
            "rpc_servers": self._rpc_servers,
        }


_FOR_ALL = "pcd, for all sequences of the context"
rename(
    Llama,
    {"pcd_for": _FOR_ALL, "set_sequence_pcd": _FOR_ALL, "pcd_refusal": "check_pcd, which raises UnsupportedError"},
)
