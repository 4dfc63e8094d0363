"""Static scales from data: observed inputs, magnitude histograms, range selection and health checks."""
