"""The trainer's side of the contract.

pacing      which group may be asked of a server that holds which version, and when a batch may be trained
book        which groups are open, who was asked for what, what is finished
requests    ids, seeds, budgets: what a group looks like on the wire
addresses   what --servers means, now and later
members     who belongs to the fleet now
states      of one server, seen from the trainer
connection  one server: heartbeat, what it holds, its state
calls       what it is asked for
upkeep      versions sent to it, and its samples for the probe
offences    what it did wrong, and how much it may be given
words       what it says, made fit for a log
dispatch    who is asked for what next
scoring     completions on their way to the scorer
events         what a connection asks of the fleet and tells it
sampling    what a candidate samples for the probe
plausible   what a status may say before it is believed
validate    what a completion must be before anybody looks at it
publisher   versions of the weights on their way to the servers
payload     one version, cut into chunks
deltas     what the last versions changed
trees       who passes a version on to whom
refusals    what a server may say to a version
evaluation  one version pinned on some servers
fleet       all of it on one thread, behind blocking calls
probe       what is compared when trainer and server meet
logprob_parity  what is judged of every server's log-probs from then on
trust       who is sent away, what is asked for again
"""
