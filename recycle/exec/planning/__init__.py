"""Makes plans while a job trains: for the live workers, for slow workers, and in the background."""
