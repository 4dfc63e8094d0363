"""What other software reads: a model's FP8 codes and scales in foreign files, each checked before it is kept."""
