"""Turn a text into a language model, and put it to work, from the shell."""

__version__ = "0.1.0"
