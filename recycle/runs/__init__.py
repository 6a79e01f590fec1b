"""What the directory of a run holds, and its report."""
