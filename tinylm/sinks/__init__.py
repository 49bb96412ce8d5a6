"""Experiment trackers that receive the metrics of a training run, each in a process of its own.

`callback` is the training callback, `process` starts and ends the process, and `worker` runs in it.
"""
