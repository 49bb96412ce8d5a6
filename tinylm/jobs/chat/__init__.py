"""Conversations, in which a decoder predicts the answers."""
