"""Evaluation of trained models, with one file per architecture: text (decoders), masked (encoders), pairs
(encoder-decoders).
"""
