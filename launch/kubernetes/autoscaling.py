"""--autoscale: generators come and go with the completions that queue at them."""

from launch.kubernetes.cluster import Launch
from launch.rendered import RenderedFile, manifest


def autoscaling(launch: Launch) -> RenderedFile:
    settings, cluster = launch.settings, launch.cluster
    target = cluster.queue_target or max(1, settings.config.fleet.slots // 2)
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "name": launch.fleet}
    bounds = settings.generators, cluster.maximum_generators
    why = f"""How many generators there are: from {bounds[0]} to {bounds[1]}, about one for each {target} completions
    that wait for a slot. Where the trainer is the slower side it asks for less, nothing queues: the least remain."""
    if cluster.autoscale == "hpa":
        metric = {
            "type": "Pods",
            "pods": {
                "metric": {"name": "scalerl_generator_queued"},
                "target": {"type": "AverageValue", "averageValue": str(target)},
            },
        }
        spec = {"scaleTargetRef": deployment, "minReplicas": bounds[0], "maxReplicas": bounds[1], "metrics": [metric]}
        document = launch.document("HorizontalPodAutoscaler", launch.fleet, api="autoscaling/v2", spec=spec)
        why += "\n\nThe metric of the pods comes from Prometheus by prometheus-adapter, or any other server of it."
    else:
        selector = f'namespace="{cluster.namespace}",pod=~"{launch.fleet}-.*"'
        trigger = {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": cluster.prometheus,
                "query": f"sum(scalerl_generator_queued{{{selector}}})",
                "threshold": str(target),
            },
        }
        spec = {
            "scaleTargetRef": deployment,
            "minReplicaCount": bounds[0],
            "maxReplicaCount": bounds[1],
            "cooldownPeriod": 600,
            "triggers": [trigger],
        }
        document = launch.document("ScaledObject", launch.fleet, api="keda.sh/v1alpha1", spec=spec)
    return manifest("autoscaling.yaml", why, ("", document))
