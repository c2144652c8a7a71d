"""The certificate that the generators show, made by cert-manager: by an authority of the run's own, or the user's."""

from launch.kubernetes.cluster import Launch
from launch.rendered import RenderedFile, manifest

_CERTIFICATE_HOURS = 24 * 365
_AUTHORITY_HOURS = 10 * _CERTIFICATE_HOURS


def certificates(launch: Launch) -> RenderedFile:
    api = "cert-manager.io/v1"
    kind, _, issuer = launch.cluster.issuer.partition("/")
    documents = []
    if not issuer:
        kind, issuer, first = "Issuer", f"{launch.name}-authority", f"{launch.name}-self-signed"
        authority = {
            "isCA": True,
            "commonName": f"{launch.name} generators",
            "secretName": issuer,
            "duration": f"{_AUTHORITY_HOURS}h",
            "privateKey": {"algorithm": "ECDSA", "size": 256},
            "issuerRef": {"kind": "Issuer", "name": first},
        }
        documents += [
            ("An authority of this run alone.", launch.document("Issuer", first, api=api, spec={"selfSigned": {}})),
            ("", launch.document("Certificate", issuer, api=api, spec=authority)),
            ("", launch.document("Issuer", issuer, api=api, spec={"ca": {"secretName": issuer}})),
        ]
    names = [launch.host, f"{launch.host}.cluster.local", f"{launch.fleet}.{launch.cluster.namespace}", launch.fleet]
    certificate = {
        "secretName": launch.tls,
        "dnsNames": names,
        "duration": f"{_CERTIFICATE_HOURS}h",
        "usages": ["server auth", "client auth"],
        "privateKey": {"algorithm": "ECDSA", "size": 256, "rotationPolicy": "Always"},
        "issuerRef": {"kind": kind, "name": issuer},
    }
    above = f"""What every generator shows. A server reads it as it starts: one that runs for longer than
    {_CERTIFICATE_HOURS // 24} days is to be restarted (kubectl rollout restart)."""
    documents.append((above, launch.document("Certificate", launch.tls, api=api, spec=certificate)))
    return manifest("tls.yaml", f"TLS between trainer and generators of {launch.name}, by cert-manager.", *documents)
