"""Import and export of Hugging Face models: configuration, tensors and files."""
