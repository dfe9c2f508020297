"""Checks that users call: ``verify``, ``doctor`` and the preview of a patch, with printable results."""
