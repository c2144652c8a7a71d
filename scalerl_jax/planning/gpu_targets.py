"""Descriptions of GPUs, with which the compiler can compile without such a GPU.

The text is XLA's GpuTargetConfigProto. The figures are those that a driver reports, from XLA's files
(openxla/xla, xla/backends/gpu/target_config/specs); those of L4 and L40S are the maker's.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """The properties that the compiler's decisions depend on."""

    name: str  # the driver's name of it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of a core
    shared_memory: int  # bytes of a core
    memory: int  # bytes
    memory_rate: int  # bytes a second
    cache: int  # bytes, second level
    clock: float  # GHz
    extended: bool  # has the instructions of its generation alone (sm_90a, sm_100a)

    @property
    def text(self) -> str:
        major, minor = self.capability
        extension = "ACCELERATED_FEATURES" if self.extended else "NONE"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory - 1024}
  threads_per_core_limit: 2048
  core_count: {self.cores}
  fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {self.memory_rate}
  l2_cache_size: {self.cache}
  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.name}"
"""


TARGETS = {  # by the name of the chip in launch/machines.py
    "a100-80gb": Target("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167_936, 85_100_068_864, 2_039_040_000_000,
                        41_943_040, 1.41, False),
    "l4": Target("NVIDIA L4", (8, 9), 58, 128, 102_400, 24_000_000_000, 300_000_000_000, 50_331_648, 2.04, False),
    "l40s": Target("NVIDIA L40S", (8, 9), 142, 128, 102_400, 48_000_000_000, 864_000_000_000, 100_663_296, 2.52, False),
    "h100": Target("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233_472, 84_942_979_072, 3_352_320_000_000, 52_428_800,
                   1.98, True),
    "h200": Target("NVIDIA H200 141GB HBM3e", (9, 0), 132, 128, 233_472, 151_397_597_184, 4_800_000_000_000, 52_428_800,
                   1.98, True),
    "b200": Target("NVIDIA B200", (10, 0), 148, 128, 233_472, 191_514_411_008, 7_672_320_000_000, 132_644_864, 1.965,
                   True),
}  # fmt: skip
