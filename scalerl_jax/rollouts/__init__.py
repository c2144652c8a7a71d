"""The trainer's side of the contract.

pacing      which group may be asked of a server that holds which version, and when a batch may be trained
book        which groups are open, who was asked for what, what is finished
requests    ids, seeds, budgets: what a group looks like on the wire
addresses   what --servers means, now and later
members     who belongs to the fleet now
connection  one server: heartbeat, leases, pushes
sampling    what a newcomer samples for the probe
validate    what a completion must be before anybody looks at it
publisher   versions of the weights on their way to the servers
payload     one version, cut into chunks
patches     what the last versions changed
trees       who passes a version on to whom
refusals    what a server may say to a version
evaluation  one version pinned on some servers
fleet       all of it on one thread, behind blocking calls
probe       what is compared when trainer and server meet
"""
