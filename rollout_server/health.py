"""Whether a generator serves, asked on the standard health service with what its calls must carry: for probes.

    python -m rollout_server.health --address=127.0.0.1:8500 --tls_authority=ca.crt --tls_name=NAME --token_file=F

Exit code 0 if it answers SERVING, else 1 and a line on stderr; 2 for wrong flags. If calls need neither TLS nor a
token, the kubelet's own grpc probe or grpc_health_probe is enough.
"""

import argparse
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scalerl_jax.contract import rpc, security


def ask(address: str, credentials: security.Credentials, *, seconds: float) -> str:
    """ "SERVING", or another status of grpc.health.v1, or why there is no answer within `seconds`."""
    request = health_pb2.HealthCheckRequest(service=rpc.SERVICE)
    with security.connect_here(address, credentials) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds)
        except grpc.RpcError as error:
            return security.refusal(error, credentials) or f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--address", required=True, help="host:port")
    parser.add_argument("--tls_authority", default="", help="PEM of who signs the server's certificate; none: no TLS")
    parser.add_argument("--tls_name", default="", help="that the certificate carries, where it is not the host")
    parser.add_argument("--tls_certificate", default="", help="PEM of the asker's own, for servers that want one")
    parser.add_argument("--tls_key", default="", help="PEM of its private key")
    parser.add_argument("--token_file", default="", help="with the token that calls carry")
    parser.add_argument("--seconds", type=float, default=10.0, help="that the answer may take")
    given = parser.parse_args(arguments)
    try:
        pair = security.read_pair(given.tls_certificate, given.tls_key, where=("--tls_certificate", "--tls_key"))
        credentials = security.Credentials(
            security.read_authority(given.tls_authority, where="--tls_authority"),
            *pair,
            security.read_token(given.token_file, where="--token_file"),
            given.tls_name,
        )
    except ValueError as error:
        parser.error(str(error))
    status = ask(given.address, credentials, seconds=given.seconds)
    if status == "SERVING":
        return 0
    print(f"{given.address}: {status}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
