"""What a model trains on: batches of plain text, of Megatron's indexed datasets, or of a user's own function."""
