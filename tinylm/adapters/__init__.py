"""Adapters: LoRA and bottleneck layers that are trained in a frozen base model, and saved without it."""
