"""Training: real text to tokens, a decoder to train in any precision, and the run folder it leaves behind."""
