"""Several processes that train one model: launch, rendezvous, and what a rank sends and receives."""
