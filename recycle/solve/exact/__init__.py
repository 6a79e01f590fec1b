"""Small problems solved to optimality: an integer program, and the child process that solves it."""
