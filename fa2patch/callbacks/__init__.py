"""Callbacks that patch the models of a training program: of Transformers' Trainer and of Lightning."""
