"""Plugins of other training programs that patch their models, one module for each program. Nothing imports them here.

The names of modules and classes are what users write into their configurations.
"""
