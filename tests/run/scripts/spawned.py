"""Print whether models are patched in processes that a script spawns or forks: ``python spawned.py FOLDER``."""

import multiprocessing
import sys


def patched(folder):
    from transformers import AutoConfig, AutoModelForCausalLM

    import fa2patch

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return fa2patch.status(model) is not None


if __name__ == "__main__":
    for how in ("spawn", "fork"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(how, pool.apply(patched, (sys.argv[1],)))
