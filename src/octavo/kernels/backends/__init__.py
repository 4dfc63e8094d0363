"""Backends: each casts or multiplies the problems it supports, and says why it cannot run the others."""
