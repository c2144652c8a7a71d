"""The states of one server, seen from the trainer.

connecting ──answers──> updating ──holds the version──> probing ──samples are in──> candidate ──admit()──> active
    ^                      |   ^─────────────── a newer version came ──────────────────┘                    |
    └──── no answer for silence_seconds, connection refused, another process on the port, ... ──────────────┘
rejected: turned away for good; another process on the same address is met anew
superseded: it holds weights of a trainer that was started later; left alone until it does not
leaving:  no longer listed; delivers what it was asked for, and is released then
"""

CONNECTING, UPDATING, PROBING, CANDIDATE = "connecting", "updating", "probing", "candidate"
ACTIVE, REJECTED, SUPERSEDED, LEAVING = "active", "rejected", "superseded", "leaving"
ANSWERING = (UPDATING, PROBING, CANDIDATE, ACTIVE)
