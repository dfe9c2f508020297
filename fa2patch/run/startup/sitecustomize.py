"""The start of every Python under ``fa2patch run``: ``site`` finds this module through PYTHONPATH.

Pythons of other environments inherit PYTHONPATH and find it too. There it takes its folder off ``sys.path`` and does
nothing else. In each of them it runs the sitecustomize that it hides.
"""

# Any Python may be started, so nothing here may be unknown to an older one, such as 3.6 or 2.7.
import os
import sys

sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(os.path.abspath(__file__))]
tag = getattr(getattr(sys, "implementation", None), "cache_tag", None)
if os.environ.get("FA2PATCH_RUN_IN") == os.pathsep.join([str(tag), os.path.realpath(sys.prefix)]):
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    try:
        __import__("fa2patch_startup").begin()
    finally:
        del sys.path[0]

if __name__ == "sitecustomize":
    mine = sys.modules.pop(__name__)
    try:
        __import__(__name__)
    except ImportError as error:
        if getattr(error, "name", str(error)[len("No module named ") :]) != __name__:
            raise
    finally:
        sys.modules.setdefault(__name__, mine)
