"""Built-in strategies: a folder for each noun, a file for each strategy.

They come in through the door that every plugin uses: each folder is an entry point of the group ``trencadis``.
"""
