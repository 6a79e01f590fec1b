"""Plans while a job trains: made for whoever is left, for workers that are slow, in the background."""
