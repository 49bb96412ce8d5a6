"""Questions about trained models: which of two is better, and what a model repeats of its text."""
