"""What a device has done of what it was given: clocks of the host and of GPUs, and progress for the heartbeat."""
