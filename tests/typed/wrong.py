"""Mistakes: type checkers find one in each line that ends with the word "wrong", and in no other. It is read, not run."""

from __future__ import annotations

import pypcd
from pypcd import Lama  # wrong

llm = pypcd.Llama("model.gguf")

pypcd.Lama("model.gguf")  # wrong
pypcd.Llama()  # wrong
pypcd.Llama(3)  # wrong
pypcd.Llama("model.gguf", 512)  # wrong
pypcd.Llama("model.gguf", n_ctx="3")  # wrong
pypcd.Llama("model.gguf", pcd=3.5)  # wrong
pypcd.Llama("model.gguf", engine="stok")  # wrong
pypcd.Llama.from_pretrained("owner/model")  # wrong

pypcd.PCDConfig(bta=1.5)  # wrong
pypcd.PCDConfig(beta="1.5")  # wrong
pypcd.PCDConfig(band="lwo")  # wrong
pypcd.PCDConfig.unsure()  # wrong
pypcd.PCDConfig().beta = 1.5  # wrong

llm.pcd = 3.5  # wrong

llm()  # wrong
llm(3)  # wrong
llm(prompt=3)  # wrong
llm("Once", pcd=3.5)  # wrong
llm("Once")["choice"]  # wrong
llm("Once")["choices"][0]["message"]  # wrong
llm("Once", stream=True)["choices"]  # wrong
for text in llm("Once"):
    text["choices"]  # wrong

llm.create_completion(prompt=3)  # wrong
llm.create_chat_completion("Who?")  # wrong
llm.create_chat_completion([{"role": "usr", "content": "Who?"}])  # wrong
llm.create_chat_completion([])["choices"][0]["text"]  # wrong
llm.generate("Once")  # wrong
llm.pcd_logits().contrast  # wrong
llm.pcd_stat()  # wrong
