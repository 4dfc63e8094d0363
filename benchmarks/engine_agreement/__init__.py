"""Agreement of engines on SmolLM2-135M: one folder in two readers, and every pair of profiles."""
