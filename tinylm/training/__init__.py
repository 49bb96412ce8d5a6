"""Training: learning-rate schedules, optimizers, the training loop, exact resume, and the pipeline of a run."""
