"""Experiment trackers that receive the metrics of a training run, each in a process of its own.

`callback` has the training callback, `process` starts and ends the process, and `worker` is its program.
"""
