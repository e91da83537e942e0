"""Formats of published checkpoints: a class each, from the tensors of the files to the forms that weights are held in."""
