"""The keyword arguments that pypcd.Llama passes on to llama_cpp.Llama, with their types: for type checkers and editors, which read them
from `**kwargs: Unpack[...]` (PEP 692). What they mean is in llama_cpp's own documentation; tests/llama/test_options.py compares the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from llama_cpp import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
    from llama_cpp.llama_chat_format import LlamaChatCompletionHandler
    from llama_cpp.llama_tokenizer import BaseLlamaTokenizer
    from llama_cpp.llama_types import (
        ChatCompletionFunction,
        ChatCompletionRequestFunctionCall,
        ChatCompletionRequestResponseFormat,
        ChatCompletionTool,
        ChatCompletionToolChoiceOption,
    )

__all__ = ["Chat", "Completion", "Generation", "Opening", "Sample"]


class _Sampling(TypedDict, total=False):
    """Of everything that samples."""

    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    frequency_penalty: float
    presence_penalty: float
    tfs_z: float
    mirostat_mode: int
    mirostat_eta: float
    mirostat_tau: float
    logits_processor: LogitsProcessorList | None
    grammar: LlamaGrammar | None


class Completion(_Sampling, total=False):
    """Of create_completion() besides the prompt and stream."""

    suffix: str | None
    max_tokens: int | None
    temperature: float
    logprobs: int | None
    echo: bool
    stop: str | list[str] | None
    seed: int | None
    model: str | None
    stopping_criteria: StoppingCriteriaList | None
    logit_bias: dict[int, float] | None


class Chat(_Sampling, total=False):
    """Of create_chat_completion() besides the messages and stream."""

    functions: list[ChatCompletionFunction] | None
    function_call: ChatCompletionRequestFunctionCall | None
    tools: list[ChatCompletionTool] | None
    tool_choice: ChatCompletionToolChoiceOption | None
    temperature: float
    stop: str | list[str] | None
    seed: int | None
    response_format: ChatCompletionRequestResponseFormat | None
    max_tokens: int | None
    model: str | None
    logit_bias: dict[int, float] | None
    logprobs: bool | None
    top_logprobs: int | None


class Sample(_Sampling, total=False):
    """Of sample()."""

    temp: float
    penalize_nl: bool
    idx: int | None


class Generation(_Sampling, total=False):
    """Of generate() besides the tokens."""

    temp: float
    reset: bool
    penalize_nl: bool
    stopping_criteria: StoppingCriteriaList | None


class Opening(TypedDict, total=False):
    """Of llama_cpp.Llama() besides those that pypcd.Llama names itself."""

    split_mode: int
    main_gpu: int
    tensor_split: list[float] | None
    vocab_only: bool
    use_mmap: bool
    use_mlock: bool
    kv_overrides: dict[str, bool | int | float | str] | None
    seed: int
    n_batch: int
    n_ubatch: int
    rope_scaling_type: int | None
    pooling_type: int
    attention_type: int
    rope_freq_base: float
    rope_freq_scale: float
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_orig_ctx: int
    logits_all: bool
    embedding: bool
    offload_kqv: bool
    op_offload: bool | None
    swa_full: bool | None
    no_perf: bool
    last_n_tokens_size: int
    lora_base: str | None
    lora_scale: float
    lora_path: str | None
    numa: bool | int
    chat_format: str | None
    chat_handler: LlamaChatCompletionHandler | None
    tokenizer: BaseLlamaTokenizer | None
    type_k: int | None
    type_v: int | None
    spm_infill: bool
