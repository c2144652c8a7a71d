#!/usr/bin/env bash
# Submits the jobs of {{ settings.name }}.
set -euo pipefail
cd {{ folder | sh }}
mkdir -p {{ state | sh }}/logs
{% for script in scripts %}
sbatch {{ script }}
{% endfor %}
