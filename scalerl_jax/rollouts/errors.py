"""Errors that end a run or an evaluation because servers cannot be used; each message is one line."""


class FleetError(ValueError):
    """The servers given cannot be used; the message is one line."""


class ProbeError(ValueError):
    """The server would run another policy than the trainer; the message is one line."""


class EvaluationLost(Exception):
    """Every server that evaluated is gone, and the others hold newer weights: evaluate a newer version instead."""
