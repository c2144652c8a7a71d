"""HTTP over rollout servers, with sessions that are recorded token for token.

sessions.py        the turns of a session as a graph, its branches, retries; no HTTP and no gRPC
journal.py         a session on disk
chat.py            messages as tokens and tokens as a message: chat template, thinking, tool calls, stop strings
generators.py      the servers: which are available, which one a call goes to
wire.py            what the protocols share; openai_wire.py, responses_wire.py and anthropic_wire.py: bodies and answers
app.py             routes, keys, errors, streams
server.py          listening socket and HTTP server
agents.py          the gateway of a run that trains agents
command.py         scalerl-gateway
"""
