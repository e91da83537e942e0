"""Parts of `tools/train_demo.py`: the corpus, the training loop and the published files."""
