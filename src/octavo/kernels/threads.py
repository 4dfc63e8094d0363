"""The threads of the native kernels: those of torch's OpenMP runtime, a team for every thread that calls.

A team's operation ends when all of its threads have come. On a machine that is busy with other work one of them waits
for a core, for milliseconds, and the others wait for it. So a kernel that had to wait for a late thread lets those that
follow, for 50 ms to 2 s, run on threads of octavo's own, where an operation ends when its parts are done; and lets the
threads of torch's operations wait asleep in that time, so that the late one may have their core. Neither the number of
threads nor any result changes.
"""

import octavo.kernels.native_bindings as native_bindings

__all__ = ["check_threads", "count_threads", "release_threads"]


def count_threads() -> int:
    """Count the threads that the kernels use for large tensors when called from this thread.

    1 without torch's OpenMP runtime, 0 without the extension. The runtime keeps the number for each thread: a new
    thread has OMP_NUM_THREADS' until ``torch.set_num_threads`` is called in it, or torch has worked in it. Where it
    is the number of cores, which is torch's default, a container's quota of fewer counts.
    """
    return 0 if native_bindings.why_absent() else native_bindings.extension().max_threads()


def release_threads() -> None:
    """End the calling thread's team; it has a new one as soon as it needs one.

    A thread whose work is done, such as one that loaded a model for another, slows the others down as long as its team
    is there: GNU's runtime counts the threads of all teams, and where they are more than the cores, it puts them to
    sleep at the end of every operation instead of letting them spin.
    """
    if not native_bindings.why_absent():
        native_bindings.extension().release_threads()


def check_threads() -> None:
    """Look whether the calling thread's team finds a core each, as every kernel does.

    For loops in which torch's own operations wait for late threads, and few kernels or none of octavo's run.
    """
    if not native_bindings.why_absent():
        native_bindings.extension().check_threads()
