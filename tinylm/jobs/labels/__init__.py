"""Texts with a label each, which a classifier predicts."""
