"""Functions that run in parallel threads, switched as often as possible."""

import sys
import threading


def in_threads(*works, times=3):
    # The result is what each function returned in ``times`` runs. The first error of any is raised here.
    barrier, results = threading.Barrier(len(works)), [None] * len(works)

    def run(index, work):
        barrier.wait()
        try:
            results[index] = [work() for _ in range(times)]
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index, work)) for index, work in enumerate(works)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
