"""What carries a run out on several devices: the world of its processes, and who starts them."""
