"""PCD in programs of others: llama_cpp.Llama itself (install), llama_cpp.server, lm-evaluation-harness."""
