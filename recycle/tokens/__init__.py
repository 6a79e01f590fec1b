"""Tokenized data sets in Megatron-LM's file format; nothing here imports torch.

token_files.py  the format of `.bin` and `.idx`, and its writer
tokenize.py     documents from JSON lines and text, and their tokens
"""
