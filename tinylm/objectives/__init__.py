"""Training objectives, which are functions (model, batch) -> Loss, and tasks, which combine them with datasets."""
