"""Training objectives, which are functions (model, batch) -> Loss, and tasks, which join them with datasets."""
