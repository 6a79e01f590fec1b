"""Training data: batches of plain text, of Megatron's indexed datasets, or of a user's function."""
