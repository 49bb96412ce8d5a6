"""Training: schedule, optimizer, the trainer's loop, exact resume, and the session that runs them on a run folder."""
