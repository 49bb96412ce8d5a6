"""The parts of the transformer.

Letters in shape comments: B batch, T tokens (queries), S keys, D width (d_model), H heads, K key/value heads (in a
mixture of experts: experts per token), W head dimension, F feed-forward width, E experts, L layers, V vocabulary size.
"""
