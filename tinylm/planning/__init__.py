"""Model, batch, schedule, memory and time of a training run, chosen from the data, the budget and the machine."""
