"""Compare Transformers' DataCollatorWithFlattening with ours: signature, keys, values, dtypes and types.
Prints a JSON object with the number of batches, the differences, and the parameters that ours lacks.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random

import numpy as np
import torch
import transformers

import fa2patch


def options():
    # Every combination of the options that this version has.
    theirs = inspect.signature(transformers.DataCollatorWithFlattening).parameters
    values = {"return_tensors": ["pt", "np"]}
    if "separator_id" in theirs:
        values["separator_id"] = [-100, 3]
    for name, parameter in theirs.items():
        if isinstance(parameter.default, bool):
            values[name] = [False, True]
    if "position_ids_start" in theirs:
        values["position_ids_start"] = [0, 2]
    return [dict(zip(values, chosen)) for chosen in itertools.product(*values.values())]


def examples(draw, labels, kind):
    found = []
    for _ in range(draw.randint(1, 4)):
        ids = [draw.randint(3, 500) for _ in range(draw.randint(1, 7))]
        one = {"input_ids": ids, "labels": [-100, *ids[1:]]} if labels else {"input_ids": ids}
        found.append({name: kind(value) for name, value in one.items()})
    return found


def described(value):
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return [type(value).__name__, str(value.dtype), value.tolist()]
    return [type(value).__name__, value]


def differences(given, batch, call):
    # The collator made without options is called with ``call``.
    theirs = transformers.DataCollatorWithFlattening(**given)
    ours = fa2patch.DataCollatorWithFlattening(**given)
    expected, found = theirs(batch, **call), ours(batch, **call)
    return [
        [name, given, call, batch]
        for name in {*expected, *found}
        if name not in expected or name not in found or described(expected[name]) != described(found[name])
    ] + [[type(expected).__name__, type(found).__name__]] * (type(expected) is not type(found))


def signature():
    # Their parameters, and those of their call, that ours lacks or has another default for.
    pairs = [
        (transformers.DataCollatorWithFlattening, fa2patch.DataCollatorWithFlattening),
        (transformers.DataCollatorWithFlattening.__call__, fa2patch.DataCollatorWithFlattening.__call__),
    ]
    found = []
    for one, other in pairs:
        ours = inspect.signature(other).parameters
        for name, parameter in inspect.signature(one).parameters.items():
            if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                continue
            if name not in ours or ours[name].default != parameter.default:
                found.append(name)
    return found


def main():
    draw, differ, seen = random.Random(0), [], 0
    takes_tensors = "tolist" in inspect.getsource(transformers.DataCollatorWithFlattening)
    kinds = (list, torch.tensor, np.array) if takes_tensors else (list,)
    calls = [{}, {"return_tensors": "np"}]
    if "separator_id" in inspect.signature(transformers.DataCollatorWithFlattening.__call__).parameters:
        calls.append({"return_tensors": "pt", "separator_id": 7})
    for given in options():
        for labels, kind, call in itertools.product((False, True), kinds, calls):
            differ += differences(given, examples(draw, labels, kind), call)
            seen += 1
    print(json.dumps({"batches": seen, "differ": [str(one) for one in differ[:3]], "signature": signature()}))


if __name__ == "__main__":
    main()
