"""Cost of FP8 for each layer of a language model, and the best mix of precisions."""
