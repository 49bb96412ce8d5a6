"""Adapters: LoRA and bottleneck layers, trained on a frozen base model and saved without it, and those of PEFT."""
