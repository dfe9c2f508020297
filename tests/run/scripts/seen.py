"""Print as JSON what a script sees of its interpreter and, with ``child``, what a Python that it starts sees."""

import json
import os
import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "wrapt", "fa2patch", "click")


def seen():
    return {
        "argv": sys.argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "spec": getattr(__spec__, "name", None),
        "main": sys.modules["__main__"].__dict__ is globals(),
        "flags": str(sys.flags),
        "warnings": sys.warnoptions,
        "heavy": [name for name in HEAVY if name in sys.modules],
        "sitecustomize": getattr(sys.modules.get("sitecustomize"), "WHOSE", None),
    }


if __name__ == "__main__":
    found = seen()
    if "child" in sys.argv:
        code = "import seen, json; print(json.dumps(seen.seen()))"
        folder = os.path.dirname(os.path.abspath(__file__))
        found["child"] = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=folder))
    print(json.dumps(found))
