"""Small trainable parts put into a frozen model: inject (replace named modules) and lora."""
