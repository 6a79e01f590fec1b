"""Models of Hugging Face in and out: their configuration, tensors and files."""
