"""The transformer, as parts. Imports torch, the configuration and the errors, and nothing else of tinylm.

Letters in shape comments: B batch, T time (tokens), S keys in sight, D width, H heads, K key/value heads, W head width,
F feed-forward width, V vocabulary.
"""
