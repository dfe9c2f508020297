"""End in the given way: ``python ends.py exit|words|error|interrupt|late``."""

import atexit
import os
import signal
import sys


def deeper(how):
    if how == "exit":
        sys.exit(7)
    if how == "words":
        sys.exit("that was it")
    if how == "error":
        raise ValueError("on purpose")
    if how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if how == "late":
        atexit.register(lambda: print(f"{__name__} {sys.argv[1:]}"))


if __name__ == "__main__":
    deeper(sys.argv[1])
