"""Plain text: a decoder predicts the next token."""
