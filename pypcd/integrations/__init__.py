"""PCD in programs of others: llama_cpp.Llama itself (install), lm-evaluation-harness."""
