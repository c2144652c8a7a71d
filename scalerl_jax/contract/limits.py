"""Sizes and intervals that both ends of a connection must agree on."""

import os

# A chunk of weights: 1 to 2 MiB is the fastest over gRPC; the bound keeps one message from holding up the event loop.
MAXIMUM_CHUNK_BYTES = 16 * 2**20

# A chunk and its envelope, or a very long completion (12 bytes a token at most, and those of its experts).
MAXIMUM_MESSAGE_BYTES = 64 * 2**20

# The longest message that a server accepts: a chunk and its envelope, the longest of all that is sent to it.
MAXIMUM_REQUEST_BYTES = MAXIMUM_CHUNK_BYTES + 2**16

# Hosts of one trainer, each of which sends a part of a version, in a call that is open until all parts are there.
MAXIMUM_PARTS = 256

# Of one tensor: in one part, one for each of a host's devices; in all parts together.
MAXIMUM_BLOCKS = 64
MAXIMUM_ALL_BLOCKS = 4096

# The name of a group is returned with every completion of it.
MAXIMUM_NAME_CHARACTERS = 512

# Top ids of a token that is scored, and targets. A request holds its tokens' ids and targets (16 MiB), and a reply the
# scores of as many (48 MiB).
MAXIMUM_TOP_K = 512
MAXIMUM_SCORE_IDS = MAXIMUM_CHUNK_BYTES // 4

# Temperatures at which every engine's float32 log-probabilities are finite, and of the distribution requested: below,
# vLLM samples at another one. And the share of the mass under which its threshold is lost among the denormals.
TEMPERATURES = (0.01, 100.0)
SMALLEST_TOP_P = 1e-6

# A peer that vanished without closing its connection is noticed after time + timeout.
KEEPALIVE_SECONDS = 20
KEEPALIVE_TIMEOUT_SECONDS = 10

_BOTH_ENDS = (
    ("grpc.max_send_message_length", MAXIMUM_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1000),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

# How long a server may take to stop, by its engine; then it exits whatever hangs, and later its parent may kill it.
# vLLM gives its own processes 5 s and their workers as long, one after the other.
STOP_SECONDS = {"jax": 5.0, "vllm": 30.0}

# http_proxy and https_proxy are meant for the web; gRPC would dial servers of this machine through them too. Only
# grpc_proxy is meant for us.
PROXY = ("grpc.enable_http_proxy", int("grpc_proxy" in os.environ))

# Options for grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS).
CHANNEL_OPTIONS = (
    *_BOTH_ENDS,
    PROXY,
    ("grpc.max_receive_message_length", MAXIMUM_MESSAGE_BYTES),
    # A server that was away is dialled again soon: gRPC's own back-off grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 250),
    ("grpc.max_reconnect_backoff_ms", 2000),
)

# Options for grpc.aio.server(options=SERVER_OPTIONS).
SERVER_OPTIONS = (
    *_BOTH_ENDS,
    ("grpc.max_receive_message_length", MAXIMUM_REQUEST_BYTES),
    # Two servers on one port would share its connections at random; the second must fail instead.
    ("grpc.so_reuseport", 0),
    # Half of a client's keepalive interval: pings that come faster are taken for abuse and end the connection.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SECONDS * 1000 // 2),
)
