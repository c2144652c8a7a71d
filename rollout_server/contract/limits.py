"""Sizes and intervals that both ends of a connection must agree on."""

# A chunk of weights: 1 to 2 MiB is the fastest over gRPC; the bound keeps one message from holding up the event loop.
MAXIMUM_CHUNK_BYTES = 16 * 2**20

# A chunk and its envelope, or a very long completion (12 bytes a token at most).
MAXIMUM_MESSAGE_BYTES = 64 * 2**20

# A peer that vanished without closing its connection is noticed after time + timeout.
KEEPALIVE_SECONDS = 20
KEEPALIVE_TIMEOUT_SECONDS = 10

_BOTH_ENDS = (
    ("grpc.max_receive_message_length", MAXIMUM_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAXIMUM_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

# Options for grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS).
CHANNEL_OPTIONS = (
    *_BOTH_ENDS,
    # A server that was away is dialled again soon: gRPC's own back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

# Options for grpc.aio.server(options=SERVER_OPTIONS).
SERVER_OPTIONS = (
    *_BOTH_ENDS,
    # Two servers on one port would share its connections at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
    # Half of a client's keepalive interval: pings that come faster are taken for abuse and end the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 2),
)
