"""Plain text with masked tokens, which an encoder predicts."""
