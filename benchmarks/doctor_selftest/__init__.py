"""Self-test of the doctor: short training runs with and without known faults, and the share of faults it names."""
