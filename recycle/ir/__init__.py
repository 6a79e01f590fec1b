"""The schedule: its instructions, what they depend on, how it is lowered, checked, timed and stored."""
