"""Devices, measured speed and load of the machine, and `tinylm doctor`."""
