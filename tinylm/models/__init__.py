"""Models as users know them: open, generate with, evaluate, adapt, merge, import and export."""
