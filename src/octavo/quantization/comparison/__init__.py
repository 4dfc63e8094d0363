"""Comparison of one model in several formats: the variants, the evaluation text, scores and storage."""
