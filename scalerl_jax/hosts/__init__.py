"""Many hosts as one trainer: this host's rank, and the line on which the first host sends commands to the others."""
