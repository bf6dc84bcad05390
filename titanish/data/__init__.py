"""Tokenizers, text sources, token files and the order in which training reads them."""
