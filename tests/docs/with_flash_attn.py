"""Run a page's script with the stand-in for flash-attn: ``with_flash_attn.py snippet.py``. Its trainer must isolate."""

import runpy
import sys
from pathlib import Path
from typing import Any

from compat_matrix.check import stand_in

stand_in.install()

import transformers  # noqa: E402

MODEL = transformers.PreTrainedModel
# Releases that have this check fail in it without a GPU.
CHECK = "_check_and_enable_flash_attn_2"


def without_a_gpu(check: Any) -> Any:
    def checked(cls: Any, config: Any, *args: Any, **options: Any) -> Any:
        return check(cls, config, *args, **{**options, "check_device_map": False})

    return classmethod(checked)


if __name__ == "__main__":
    if hasattr(MODEL, CHECK):
        setattr(MODEL, CHECK, without_a_gpu(getattr(MODEL, CHECK).__func__))
    sys.path.insert(0, str(Path(__file__).parent))
    from test_snippets import check_trainer

    check_trainer(runpy.run_path(sys.argv[1], run_name="__main__"))
