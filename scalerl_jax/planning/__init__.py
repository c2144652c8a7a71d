"""What a run needs and makes on machines that are not here."""
