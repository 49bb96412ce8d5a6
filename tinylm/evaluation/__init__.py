"""Evaluation: its settings, the loop over batches, and its results with confidence intervals."""
