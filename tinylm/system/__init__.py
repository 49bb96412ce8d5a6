"""Files, the cache folder, the processor and signals: what tinylm asks of the operating system. Imports no torch."""
