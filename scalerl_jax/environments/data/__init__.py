"""Reads rows from the user's files, folders and data sets of the hub, in known layouts or with named columns."""
