"""From files to batches: corpus (files to text), tokenizer (text to ids), dataset (ids on disk to batches)."""
