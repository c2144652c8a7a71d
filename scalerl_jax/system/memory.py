"""Memory that malloc holds free goes back to the system.

The buffers of an update, the completions on their way and what a checkpoint copies have many sizes and lives, so free
pieces come to lie between used ones: over thousands of updates a process holds more and more that it does not use.
glibc gives such pieces back only when it is asked.
"""

import ctypes


def trim() -> None:
    """Some milliseconds. Nothing happens with a C library that has no malloc_trim."""
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:
        function(0)
