"""Short trainings with known faults and without, and how often the doctor names what is wrong."""
