"""Configuration: of models, training and runs, presets, settings, and the checks of their values. Imports no torch."""
