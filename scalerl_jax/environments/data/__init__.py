"""Rows from what a user has: files, folders and data sets of the hub, in their own layouts or with named columns."""
