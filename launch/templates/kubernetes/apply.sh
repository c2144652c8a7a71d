#!/usr/bin/env bash
# Applies the files beside it to the cluster that kubectl talks to; may be run again.
# Wants there: {{ wants | join(", ") or "nothing beyond Kubernetes" }}.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

kubectl get namespace {{ namespace }} >/dev/null 2>&1 || kubectl create namespace {{ namespace }}

{% set at = "kubectl --namespace=" ~ namespace %}
{% macro apply_secret(name, source) %}
{{ at }} create secret generic {{ name }} --from-file={{ source | sh }} --dry-run=client --output=yaml |
    {{ at }} apply --filename=-
{%- endmacro %}
{% if cluster.token_file %}
# The token that every call carries.
{{ apply_secret(token, "token=" ~ cluster.token_file) }}
{% elif not settings.insecure %}
# The token that every call carries: made once, and in no file.
if ! {{ at }} get secret {{ token }} >/dev/null 2>&1; then
    openssl rand -hex 32 | {{ at }} create secret generic {{ token }} --from-file=token=/dev/stdin
fi
{% endif %}
{% if cluster.tls_authority %}
# Who signs the generators' certificates.
{{ apply_secret(tls, "ca.crt=" ~ cluster.tls_authority) }}
{% endif %}

{% for name in files %}
kubectl apply --filename={{ name }}
{% if name == "model.yaml" %}
{{ at }} wait --for=condition=complete --timeout=6h job/{{ run }}-model
{% endif %}
{% endfor %}
{% if settings.trainer %}

{# kubectl follows five logs at once, where it is not asked to follow more. #}
{% set most = "--max-log-requests=%d " % trainer_hosts if trainer_hosts > 5 else "" %}
echo 'the log: {{ at }} logs --follow {{ most }}--selector=app.kubernetes.io/instance={{ run }},app.kubernetes.io/component=trainer'
{% endif %}
