"""The engine: private to core, and the only place where state changes.

Reading order: ``engine``, ``state``, ``scheduling``, ``batching``, ``commit``; ``build`` and ``compose`` put it together.
"""
