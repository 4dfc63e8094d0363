"""The threads of the native kernels: those of torch's OpenMP runtime, a team for every thread that calls."""

from octavo.kernels import cpu

__all__ = ["count_threads", "release_threads"]


def count_threads() -> int:
    """How many threads the kernels use for large tensors when called from here.

    1 without torch's OpenMP runtime, 0 without the extension. The runtime keeps the number for each thread: a new
    thread has OMP_NUM_THREADS' until ``torch.set_num_threads`` is called in it, or torch has worked in it.
    """
    return 0 if cpu.why_absent() else cpu.extension().max_threads()


def release_threads() -> None:
    """End the calling thread's team; it has a new one as soon as it needs one.

    A thread whose work is done, such as one that loaded a model for another, slows the others down as long as its team
    is there: GNU's runtime counts the threads of all teams, and where they are more than the cores, it puts them to
    sleep at the end of every operation instead of letting them spin.
    """
    if not cpu.why_absent():
        cpu.extension().release_threads()
