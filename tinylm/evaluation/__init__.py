"""Evaluation of trained models, with one file per task: text and chat (decoders), masked (encoders), pairs
(encoder-decoders).
"""
