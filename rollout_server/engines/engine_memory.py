"""What a server will take of memory, known before it serves, and the line that says it.

    weights      of the version that it samples with
    swap         a second version, where an engine holds one while it takes the place of the other
    cache        keys and values of all slots at their longest
    working      what else the engine needs while it computes
    host copy    the version as it came, in the sync dtype (weight_store.py)
    process      what the process takes already: Python, its libraries, compiled programs

On an accelerator the first four are the device's and the others the host's; on a CPU all are the host's. Sizes are for
the worst case that the flags allow, so a server that begins does not end at its thousandth request for want of memory.
"""

import dataclasses

from scalerl_jax.system.memory import gib

MARGIN = 0.95  # of what is free: so much is advised to fill, since the working memory depends on the slots a little


@dataclasses.dataclass(frozen=True)
class EngineMemory:
    """In bytes."""

    slots: int
    maximum_tokens: int
    token: int  # keys and values of one token of one slot, all layers
    weights: int
    host_copy: int
    working: int = 0  # not known yet, before anything is compiled
    copies: float = 0.0  # of the cache, that are there at times beside it: a share of it
    versions: int = 2  # of the weights, on the device: 1 where they are written in place

    @property
    def cache(self) -> int:
        return self.slots * self.maximum_tokens * self.token

    @property
    def on_device(self) -> int:
        return self.fixed + round(self.cache * (1 + self.copies))

    @property
    def fixed(self) -> int:
        """Whatever the slots and their length."""
        return self.versions * self.weights + self.working

    def spare(self, *, device: int | None, host: int, process: int) -> int:
        """Bytes that are left where the caches are; see `check`."""
        return host - self.on_device - self.host_copy - process if device is None else device - self.on_device

    def check(self, *, device: int | None, host: int | None, process: int) -> str:
        """The line that says it, with what there is.

        Args:
          device: bytes that the accelerator has for this process; None: it computes on the CPU.
          host: bytes that the host has for this process, those that it takes already included; None: not known, and
            nothing is said of it.
          process: bytes that it takes already.

        Raises ValueError, in one line that says what would fit, where it does not.
        """
        on_host = self.host_copy + process
        need, there, where = self.on_device, device, "the device"
        if there is None:
            assert host is not None
            need, there, where = need + on_host, host, "this machine"
        again = ", as much again for a version on its way in" * (self.versions > 1)
        parts = [
            f"{gib(self.weights)} weights{again}",
            f"{gib(self.cache)} keys and values of {self.slots} sequences of {self.maximum_tokens} tokens",
            f"{gib(self.working + round(self.cache * self.copies))} working memory",
        ]
        if device is None:
            parts.append(f"{gib(on_host)} the process and the host's copy of the weights")
        line = f"memory: {gib(need)} GiB ({', '.join(parts)}) of the {gib(there)} GiB that {where} has"
        if device is not None and host is not None:
            line += f"; on the host {gib(on_host)} of {gib(host)} GiB"
        if need > there:
            raise ValueError(f"{line}; {self._remedy(there - (need - round(self.cache * (1 + self.copies))))}")
        if host is not None and on_host > host:
            raise ValueError(f"{line}: the host has too little, and no flag makes it less")
        return line

    def _remedy(self, free: int) -> str:
        """What fits into `free` bytes for the cache and its copies."""
        tokens = max(0, int(MARGIN * free / (1 + self.copies) / self.token))
        slots, length = tokens // self.maximum_tokens, tokens // self.slots // 32 * 32
        choices = [f"--slots={slots}"] * (slots > 0) + [f"--maximum_tokens={length}"] * (length > 0)
        return f"{' or '.join(choices)} would fit" if choices else "not even one slot of 32 tokens would fit"
