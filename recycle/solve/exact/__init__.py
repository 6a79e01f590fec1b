"""Small problems solved to optimality by an integer program."""
