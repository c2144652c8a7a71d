"""Plans a run's memory and speed on machines that need not be present."""
