"""Pairs of a source and a target, which an encoder-decoder predicts."""
