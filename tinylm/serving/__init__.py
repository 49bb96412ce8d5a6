"""The OpenAI-compatible server, and its page for models without a chat template."""
