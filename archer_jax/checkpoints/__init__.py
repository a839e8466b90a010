"""Checkpoints: folders, conversion from published ones, tokenizers."""
