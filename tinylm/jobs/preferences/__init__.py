"""Preferences: a decoder learns to prefer one of two answers."""
