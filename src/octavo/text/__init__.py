"""Text as data: sources, corpora, tokenizers, token files, overlap between texts."""
