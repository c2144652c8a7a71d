"""The trainer's side of the contract.

fleet         everything below on one thread, behind blocking calls
pacing        which group may be asked of a server that holds which version, and when a batch may be trained
group_buffer  groups in flight, ready, pending; which server was asked for what
requests      builds the requests: ids, seeds, budgets; checks a completion before it is used
trust         admission of servers; dismissal of admitted ones: their completions are requested again
evaluation    one version pinned on some servers
status        what the trainer waits for, for how long, how deep the queues are
servers/      one server seen from the trainer, and all of them
    server_state   its state, and every change of it; the requests sent to it
    client         its heartbeat, and the reactions to it; versions sent to it, and its samples for the probe
    offences       its offences, and how much work it may hold after them
    validate_status  checks a status
    pool           the fleet's current servers
    discovery      parses --servers, and reads the credentials that servers are shown
weights/      versions sent to servers
    publisher      the versions, and which one each server gets; the number by which servers identify this trainer
    push           sends one version to one server; host_parts: with several hosts each sends its part
    payload        one version, cut into chunks; what the last versions changed
parity        whether trainer and generators agree on log-probs, at admission and in all that is delivered
"""
