"""Many hosts as one trainer: which of them this is, and the line on which the first tells the others what to do."""
