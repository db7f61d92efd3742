"""How much of a memory-mapped file is in the memory of this process."""

import ctypes
import mmap
from array import array


def resident_bytes(file):
    """Bytes of a `StateFile` in this process's memory; 0 where the system does not report it."""
    return sum(map(_resident_bytes, file.maps))


def _resident_bytes(mapped):
    """Those of one mapping, by /proc/self/pagemap: quick in a large process too."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    pages = array("Q")
    try:
        with open("/proc/self/pagemap", "rb") as of_process:
            of_process.seek(start // mmap.PAGESIZE * pages.itemsize)
            pages.frombytes(of_process.read(len(mapped) // mmap.PAGESIZE * pages.itemsize))
    except OSError:
        return 0
    return sum(page >> 63 for page in pages) * mmap.PAGESIZE  # the highest bit: it is present
