"""The OpenAI-compatible server, and its two pages: a chat, or completions for models without a chat template."""
