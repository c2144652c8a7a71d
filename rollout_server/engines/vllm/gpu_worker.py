"""vLLM's worker for GPUs, which also records the experts of tokens."""

from vllm.v1.worker.gpu_worker import Worker

from rollout_server.engines.vllm.expert_record import Recording


class RecordingGpuWorker(Recording, Worker):
    pass
