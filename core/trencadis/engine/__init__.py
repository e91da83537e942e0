"""The engine: private to core, and the only place where state changes.

Reading order: ``engine``, ``scheduler``, ``admission``, ``state``, ``passes``, ``committer``, ``recovery``; ``build`` puts it together.
"""
