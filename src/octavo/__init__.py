"""FP8 training, diagnosis, calibration, export and serving for PyTorch."""
