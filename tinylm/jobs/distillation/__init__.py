"""Plain text, with the predictions of other models as targets."""
