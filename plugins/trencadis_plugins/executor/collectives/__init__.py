"""Collectives of rank processes: in shared memory, over torch.distributed, and of a rank alone; ``groups`` makes and opens them."""
