"""What the queue is turned into: patched wheels and their index, and patched trees."""
