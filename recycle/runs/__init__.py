"""Contents of a run's directory, and reports about the run."""
