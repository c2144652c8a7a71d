{# Options that both jobs have: what of the cluster a job gets, the site's own options last. #}
{% macro options(values, own) %}
{% for name, value in values.items() if value %}
#SBATCH --{{ name }}={{ value }}
{% endfor %}
{% for option in own %}
#SBATCH {{ option }}
{% endfor %}
{% endmacro %}

{# Puts the job in the queue again, unless it is cancelled, or Slurm does so by itself (a preemption). #}
{% macro queue_again(condition, what, job) %}
state=$(scontrol --oneliner show job "{{ job }}")
if {{ condition }} && [[ "$state" == *JobState=RUNNING* ]]; then
    echo "{{ what }}: queued again" >&2
    scontrol requeue "{{ job }}"
fi
{% endmacro %}
