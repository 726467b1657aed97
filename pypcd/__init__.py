"""Positional Contrastive Decoding for GGUF models."""
