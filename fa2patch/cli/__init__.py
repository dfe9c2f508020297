"""The ``fa2patch`` command line. It only parses arguments and prints results."""
