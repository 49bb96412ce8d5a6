"""The losses of scored tokens: functions (model, batch) -> Loss."""
