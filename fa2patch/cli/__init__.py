"""The command line: ``fa2patch verify``, ``doctor``, ``status``, ``matrix`` and ``run``. It parses and prints."""
