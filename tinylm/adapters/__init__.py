"""Small trainable parts put into a frozen model: lora and bottleneck, what they share, and how they are loaded."""
