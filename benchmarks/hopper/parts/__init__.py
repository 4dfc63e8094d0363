"""The parts of the benchmark, one file a theme; each yields its sections as they are finished."""
