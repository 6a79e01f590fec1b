"""What a model trains on: batches of plain text or of Megatron's indexed datasets."""
