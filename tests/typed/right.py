"""A program that uses pypcd as it is meant to be used; type checkers find nothing to say. It is read, not run."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Literal

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_cpp.llama_types import (
    ChatCompletionRequestMessage,
    CreateChatCompletionResponse,
    CreateCompletionResponse,
)
from typing_extensions import assert_type

import pypcd

# -- models ------------------------------------------------------------------------------------------------------------

llm = pypcd.Llama("model.gguf", pcd="unsure", n_ctx=4096, n_gpu_layers=-1, verbose=False)
pypcd.Llama(Path("model.gguf"), pcd={"beta": 1.5, "window": 64}, n_ctx=None, flash_attn=None)
pypcd.Llama(model_path="model.gguf", rpc_servers=["one:50052", "two:50052"], n_seq_max=4, use_extra_bufts=True)
pypcd.Llama("model.gguf", chat_format="chatml", type_k=8, draft_model=LlamaPromptLookupDecoding())
assert_type(pypcd.Llama.from_pretrained("owner/model", "*.gguf", pcd=True, n_ctx=512), pypcd.Llama)
stock: llama_cpp.Llama = llm

# -- settings ----------------------------------------------------------------------------------------------------------

unsure = pypcd.PCDConfig.preset("unsure")
milder = unsure.replace(beta=0.5, window=None, cache="shared")
for setting in (None, False, True, "on", unsure, milder):
    llm.pcd = setting
llm.pcd = {"beta": 0.5}
assert_type(llm.pcd, "pypcd.PCDConfig | None")


def ask(question: str, pcd: pypcd.PCDSetting = None) -> str:
    return llm(question, pcd=pcd)["choices"][0]["text"]


# -- completion --------------------------------------------------------------------------------------------------------

answer = llm("Once", max_tokens=8, temperature=0.0, pcd=False)
assert_type(answer, CreateCompletionResponse)
assert_type(answer["choices"][0]["text"], str)
assert_type(llm.create_completion([1, 2, 3], max_tokens=8, stream=False), CreateCompletionResponse)
for part in llm("Once", stream=True, stop=["."], pcd="window:relative_top=0.1"):
    assert_type(part["choices"][0]["finish_reason"], "Literal['stop', 'length'] | None")


def either(stream: bool) -> CreateCompletionResponse | Iterator[CreateCompletionResponse]:
    return llm.create_completion("Once", stream=stream)


# -- chat --------------------------------------------------------------------------------------------------------------

messages: list[ChatCompletionRequestMessage] = [{"role": "user", "content": "Who?"}]
chat = llm.create_chat_completion(messages, max_tokens=8, pcd={"beta": 1})
assert_type(chat, CreateChatCompletionResponse)
assert_type(chat["choices"][0]["message"]["content"], "str | None")
llm.create_chat_completion(
    messages=[{"role": "system", "content": "Be brief."}], response_format={"type": "json_object"}
)
for chunk in llm.create_chat_completion(messages, stream=True):
    assert_type(chunk["object"], Literal["chat.completion.chunk"])

# -- tokens ------------------------------------------------------------------------------------------------------------

tokens = llm.tokenize(b"Once")
assert_type(llm.generate(tokens, top_k=1, pcd=True), "Generator[int, Sequence[int] | None, None]")
llm.reset()
llm.eval(tokens)
assert_type(llm.sample(temp=0.0, idx=None), int)
rows: pypcd.PCDLogits = llm.pcd_logits()
stats: pypcd.PCDStats = llm.pcd_stats()
assert_type(stats.n_skipped, int)
assert_type(float(rows.contrasted[0] - rows.standard[0]), float)
state = llm.save_state()
llm.load_state(state)
llm.close()

__all__ = ["Generator", "Sequence", "ask", "either"]
