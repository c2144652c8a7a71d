"""Starting the processes of a run: on one machine (local)."""
