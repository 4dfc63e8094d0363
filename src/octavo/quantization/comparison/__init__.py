"""Formats of one model side by side: who is compared (contestants.py), on what text, by which figures (scores.py)."""
