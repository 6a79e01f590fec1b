"""The pages of the application: one per run directory, one for all schedule files."""
