"""The trainer's side of the contract.

fleet         all of it on one thread, behind blocking calls
pacing        which group may be asked of a server that holds which version, and when a batch may be trained
group_buffer  groups in flight, ready, pending: who was asked for what
requests      ids, seeds, budgets: what a group looks like on the wire
candidates    who is let in
trust         who is sent away, what is asked for again
evaluation    one version pinned on some servers
incarnation   the name by which servers know this trainer
status        who is waited for, for how long, how deep the queues are
servers/      one server seen from the trainer, and all of them
    client         its heartbeat, and what is made of it; server_state: what is known of it; states
    calls          what it is asked for
    upkeep         versions sent to it, and its samples for the probe
    offences       what it did wrong, and how much it may be given
    validate       what a completion must be before anybody looks at it; validate_status: what a status may say
    context        what all clients share, and what they tell the fleet
    pool           who belongs to the fleet now; discovery: what --servers means; credentials: what they are shown
weights/      versions going out
    publisher      the versions, and who is sent what; push: one of them to one server
    payload        one version, cut into chunks; deltas: what the last versions changed
parity        trainer and generators agree on log-probs: when they meet, and of all that is delivered
"""
