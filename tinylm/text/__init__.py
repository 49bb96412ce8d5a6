"""Corpora (files to text), tokenizers (text to token ids), token files, and batches."""
