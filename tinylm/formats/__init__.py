"""Models of other tools: Hugging Face folders, GGUF files and PEFT adapters, read and written."""
