"""Tokens in files, as Megatron-LM has them; nothing here needs torch.

token_files.py  the format of `.bin` and `.idx`, and its writer
documents.py    documents in JSON lines and in text
tokenize.py     documents to tokens
"""
